"""What a warm-up reads: every kind of captured pass over prompts comes twice, behind other text and at the beginning."""

from collections import Counter

import pytest
import torch

from polydraft.engine.warm_up import groups_to_read
from polydraft.models.hf_context import READING_SIZES, reading_count, reading_size
from polydraft.models.memory import common_prefix

GPU = torch.device("cuda")


def kinds(groups: list[list[list[int]]]) -> Counter[tuple[int, int | None, bool]]:
    """Count prompts that are read together, their size, and whether slots hold their beginnings."""
    held, *rest = groups
    found: Counter[tuple[int, int | None, bool]] = Counter()
    for group in rest:
        shared = min(common_prefix(held[0], prompt) for prompt in group)
        found[len(group), reading_size(max(len(prompt) - 1 - shared for prompt in group)), shared > 1] += 1
    return found


def test_every_pass_that_reads_prompts_is_rehearsed_twice() -> None:
    found = kinds(groups_to_read(2048, 512, slots=16, vocab_size=50_000, device=GPU))
    expected = {(count, size) for size in READING_SIZES for waiting in range(1, 9) for count in [reading_count(size, waiting)]}
    assert (4, 64) in expected and (2, 128) in expected and (2, 192) not in expected
    assert found == {(*kind, behind): 2 for kind in expected for behind in (False, True)}


@pytest.mark.parametrize(("longest", "chunk", "slots"), [(48, 512, 4), (2048, 64, 4), (2048, 512, 1)])
def test_passes_that_cannot_come_are_not_rehearsed(longest: int, chunk: int, slots: int) -> None:
    for count, size, behind in kinds(groups_to_read(longest, chunk, slots, vocab_size=50_000, device=GPU)):
        assert count <= slots and size is not None and count * size <= chunk and size + 8 * behind < longest


def test_nothing_is_rehearsed_where_nothing_is_captured() -> None:
    assert groups_to_read(2048, 512, 16, 50_000, torch.device("cpu")) == []
