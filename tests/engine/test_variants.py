"""Variants of a decoder."""

import inspect

import pytest

from polydraft.draft import Plain, TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models.tabular import TabularModel
from polydraft.papers.target_init import TargetInit
from polydraft.trees import Topology

TARGET, OTHER = TabularModel.random(5, 1, seed=0), TabularModel.random(5, 1, seed=1)
FORK = Topology.fork(2, 2)

FIELDS = {
    "target": (TARGET, OTHER),
    "drafter": (TreeDrafter(OTHER, FORK), Plain()),
    "tokenizer": (object(), None),
    "eos_token_ids": ((3,), ()),
    "defaults": (object(), None),
    "walk": ("block", "node"),
    "coupled": (True, False),
    "graphs": (False, True),
    "ahead": (False, True),
}
"""Values that are not the defaults, and others."""


def test_the_fields_of_these_tests_are_all_that_there_are() -> None:
    assert {*FIELDS, "lossless"} == {*inspect.signature(Decoder).parameters}


@pytest.mark.parametrize("changed", FIELDS)
def test_a_variant_differs_in_what_it_was_asked_for_alone(changed: str) -> None:
    decoder = Decoder(**{name: value for name, (value, _) in FIELDS.items()})
    variant = decoder.replace(**{changed: FIELDS[changed][1]})
    for name, (kept, other) in FIELDS.items():
        assert getattr(variant, name) == (other if name == changed else kept), name
        assert getattr(decoder, name) == kept


def test_a_variant_has_memories_of_its_own() -> None:
    decoder = Decoder(TARGET)
    decoder.generate([1, 2], keep=True, max_new_tokens=2, seed=0)
    assert decoder._kept is not None and decoder.replace()._kept is None


def test_only_a_lossy_decoder_has_lossy_variants_unasked() -> None:
    lossy, decoder = TargetInit(OTHER, FORK), Decoder(TARGET)
    with pytest.raises(UsageError, match="lossless=False"):
        decoder.replace(drafter=lossy)
    variant = decoder.replace(drafter=lossy, lossless=False)
    assert not variant.lossless and not variant.replace(walk="node").lossless and variant.replace(drafter=None).lossless


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown decoder argument 'graph'; did you mean 'graphs'"):
        Decoder(TARGET).replace(graph=False)
