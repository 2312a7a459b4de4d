import json

import torch

from polydraft.drafters import DRAFTERS
from polydraft.loading import _resolved
from polydraft.models import FAMILIES
from polydraft.options import LoadOptions
from polydraft.schemes import SCHEMES


def test_info_lists_everything_that_can_be_chosen(invoke) -> None:
    code, out, _ = invoke("info")
    assert code == 0
    for name in [*SCHEMES, *DRAFTERS, *FAMILIES, "smollm2", "torch", "cpu"]:
        assert name in out


def test_info_as_json(invoke) -> None:
    code, out, _ = invoke("info", "--json")
    facts = json.loads(out)
    assert code == 0 and set(facts["schemes"]) == set(SCHEMES)


def test_info_names_the_trees_that_are_used(invoke) -> None:
    _, out, _ = invoke("info", "--json")
    (said,) = json.loads(out)["default drafts"].values()
    for place, kind, words in (
        ("cpu", torch.float32, "({} in float32 and int8)"),
        ("cpu", torch.int8, "({} in float32 and int8)"),
        ("cpu", torch.bfloat16, "tree {} ("),
        ("cuda", torch.bfloat16, "on a GPU {}"),
    ):
        used = _resolved(LoadOptions("smollm2"), torch.device(place), kind)
        assert words.format(used.tree) in said and said.startswith(used.draft)
