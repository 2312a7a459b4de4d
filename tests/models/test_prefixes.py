"""Copies of beginnings: found by their tokens, in their own space, and given up when there is no room."""

import random

import pytest
import torch

from families import FAMILIES
from polydraft.models import TabularModel
from polydraft.models.hf import HFModel
from polydraft.models.memory import common_prefix
from polydraft.models.prefixes import BLOCK, Prefixes

MODEL = TabularModel.random(vocab_size=8, order=1, seed=0)
EACH = torch.zeros((), dtype=torch.long).nbytes
"""Bytes of a token in a tabular memory."""


def reading(text: list[int]):
    """Return a memory of one row that holds a text."""
    context = MODEL.start(1, len(text) + 1)
    context.prefill([text])
    return context


def text_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(8) for _ in range(length)]


def check_books(prefixes: Prefixes) -> None:
    """The pieces in the tree are those in the list, each before the one above it, and their sizes are what is counted."""
    pieces = [one for root in prefixes._roots.values() for beside in root.below.values() for one in beside]
    for one in pieces:
        assert not one.below or len(one.tokens) == BLOCK
        pieces += [below for beside in one.below.values() for below in beside]
    places = {one: place for place, one in enumerate(prefixes._recent)}
    assert set(places) == set(pieces) and prefixes.nbytes == sum(one.nbytes for one in pieces) <= prefixes.most
    assert all(places[one] < places[one.above] for one in pieces if one.above in places)


def test_a_beginning_is_found_by_its_tokens_in_its_own_space() -> None:
    prefixes, text = Prefixes(2**20), text_of(1, 3 * BLOCK + 9)
    context = reading(text)
    prefixes.keep(context, 0, "ours", text, whole=True)
    assert prefixes.known(context, "ours", text) == 3 * BLOCK
    prefixes.keep(context, 0, "ours", text, whole=False)
    for length in (1, 5, BLOCK, BLOCK + 1, 2 * BLOCK - 1, len(text)):
        assert prefixes.known(context, "ours", text[:length]) == length
        assert prefixes.known(context, "ours", [*text[:length], 8, 8]) == length
    assert prefixes.known(context, "ours", [8, *text]) == prefixes.known(context, "ours", []) == 0
    assert prefixes.known(context, "theirs", text) == 0
    assert prefixes.known(TabularModel(MODEL.logits_XV).start(1, 4), "ours", text) == 0, "another model"
    other = MODEL.start(3, 4)
    assert prefixes.paste(other, 1, "ours", [*text[: BLOCK + 7], 8]) == BLOCK + 7
    assert other.cache.tokens_BS[1, : BLOCK + 7].tolist() == text[: BLOCK + 7]
    check_books(prefixes)
    prefixes.clear()
    assert prefixes.nbytes == 0 and prefixes.known(context, "ours", text) == 0


def test_a_text_that_goes_on_takes_the_place_of_its_end() -> None:
    prefixes, text = Prefixes(2**20), text_of(2, BLOCK + 30)
    for length in (BLOCK + 3, BLOCK + 10, BLOCK + 7, BLOCK + 30):
        prefixes.keep(reading(text), 0, "", text[:length], whole=False)
        check_books(prefixes)
    assert prefixes.nbytes == EACH * (BLOCK + 30)


def test_ends_go_before_what_others_stand_on() -> None:
    shared, prefixes = text_of(3, 2 * BLOCK), Prefixes(EACH * 5 * BLOCK)
    chats = [[*shared, *[token] * BLOCK] for token in range(4)]
    for chat in chats[:3]:
        prefixes.keep(reading(chat), 0, "", chat, whole=False)
    context = reading(chats[0])
    assert prefixes.paste(MODEL.start(1, 1), 0, "", chats[0]) == 3 * BLOCK
    prefixes.keep(reading(chats[3]), 0, "", chats[3], whole=False)
    assert [prefixes.known(context, "", chat) // BLOCK for chat in chats] == [3, 2, 3, 3]
    long = text_of(4, 9 * BLOCK)
    prefixes.keep(reading(long), 0, "", long, whole=False)
    assert prefixes.known(context, "", long) == 5 * BLOCK and prefixes.known(context, "", shared) <= 1
    check_books(prefixes)


def test_no_room_at_all_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(5, 2 * BLOCK)
    context = reading(text)
    for most in (0, EACH * BLOCK - 1):
        prefixes = Prefixes(most)
        prefixes.keep(context, 0, "", text, whole=False)
        assert prefixes.nbytes == 0
    prefixes = Prefixes(2**20)
    prefixes.keep(context, 0, "", text[:BLOCK], whole=False)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(context.cache, "copied", exhausted)
    prefixes.keep(context, 0, "", text, whole=False)
    assert prefixes.nbytes == 0, "what rounds need comes first"
    check_books(prefixes)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_kept_and_found(seed: int) -> None:
    chance, prefixes = random.Random(seed), Prefixes(EACH * BLOCK * random.Random(seed).choice([2, 7, 40]))
    stems = [text_of(number, chance.randrange(4 * BLOCK)) for number in range(3)]
    kept: list[tuple[str, list[int]]] = []
    context = MODEL.start(2, 1)
    for _ in range(150):
        stem = chance.choice(stems)
        text = [*stem[: chance.randrange(len(stem) + 1)], *(chance.randrange(3) for _ in range(chance.randrange(90)))]
        space = chance.choice(["a", "a", "b"])
        if text and chance.random() < 0.6:
            prefixes.keep(reading(text), 0, space, text, whole=chance.random() < 0.3)
            kept.append((space, text))
        else:
            found = prefixes.known(context, space, text)
            assert found <= max((common_prefix(one, text) for owner, one in kept if owner == space), default=0)
            assert prefixes.paste(context, 1, space, text) == found
            assert context.cache.tokens_BS[1, :found].tolist() == text[:found]
            assert context.positions_BS[1, :found].tolist() == list(range(found))
        check_books(prefixes)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_model_goes_on_from_a_copy_bit_for_bit(family: str) -> None:
    model, prefixes = HFModel(FAMILIES.get(family).build(seed=1)), Prefixes(2**30)
    text = [5 + token for token in text_of(6, BLOCK + 20)]
    first = model.start(2, 2 * BLOCK)
    first.prefill([text, text[:7]])
    prefixes.keep(first, 0, "", text, whole=False)
    second = model.start(3, 8)  # which has no storage yet
    assert prefixes.paste(second, 2, "", [*text[:-5], 1]) == len(text) - 5
    for mine, theirs in zip(second.cache._stored, first.cache._stored, strict=True):
        assert torch.equal(mine[:, 2, :, : len(text) - 5], theirs[:, 0, :, : len(text) - 5])
    second.rewind([0, 0, len(text) - 5])
    seen: list[torch.Tensor] = []
    second.prefill([[], [], text[-5:]], lambda rows, starts, counts, features_BTF: seen.append(features_BTF[0, :5]))
    again = model.start(1, 2 * BLOCK)
    again.prefill([text[:-5]])
    again.prefill([text[-5:]], lambda rows, starts, counts, features_BTF: seen.append(features_BTF[0, :5]))
    assert torch.allclose(seen[0], seen[1], atol=1e-5)
