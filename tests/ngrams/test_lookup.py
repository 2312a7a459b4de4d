"""Prompt lookup, by n-grams and by a suffix automaton."""

import pytest

from covering import some_slow
from polydraft.ngrams import GramOptions, LookupCache, SuffixCache
from polydraft.ngrams.cache import match_chance
from polydraft.ngrams.corpus import best_paths
from polydraft.ngrams.lookup import MOST_COPIES, ROOT, SuffixAutomaton

from .brute import longest_match, places_after, random_text


def greedy(memory, length):
    """The first proposal, token by token."""
    place, tokens = memory.end(), []
    while len(tokens) < length and (ways := memory.ways(place, 1)):
        tokens.append(ways[0][0])
        place = memory.step(place, tokens[-1])
    return tokens


@pytest.mark.parametrize("seed", some_slow(range(30), range(8, 30)))
@pytest.mark.parametrize("max_match", [1, 2, 4])
def test_agrees_with_a_search_through_the_text(seed, max_match):
    subject = LookupCache(GramOptions(max_match=max_match)).open()
    text = random_text(seed, 80, vocabulary=8)
    for end in range(len(text)):
        subject.read(text[end : end + 1])
        so_far = text[: end + 1]
        copies = {}
        for size in range(longest_match(so_far, max_match), 0, -1):
            for place in places_after(so_far, so_far[-size:]):
                copies.setdefault(place, size)
        wanted = {}
        for place, size in list(copies.items())[:MOST_COPIES]:
            wanted.setdefault(so_far[place], match_chance(size, len(wanted)))
        assert subject.ways(subject.end(), 5) == list(wanted.items())[:5]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    subject = LookupCache(GramOptions()).open()
    subject.read([7, 1, 2, 1, 2, 1])
    assert greedy(subject, 5) == [2, 1, 2, 1, 2]


def state_of(automaton, gram):
    """The state of an n-gram, None where the text does not hold it."""
    state = ROOT
    for token in gram:
        if token not in automaton.steps[state]:
            return None
        state = automaton.steps[state][token]
    return state


@pytest.mark.parametrize("seed", some_slow(range(25), range(8, 25)))
def test_the_automaton_knows_exactly_the_grams_of_the_text(seed):
    text = random_text(seed, 60, vocabulary=2 + seed % 5)
    automaton = SuffixAutomaton()
    automaton.extend(text[:20])
    automaton.extend(text[20:])
    grams = {tuple(text[start:end]) for start in range(60) for end in range(start + 1, min(start + 6, 60) + 1)}
    for gram in grams:
        places = places_after([*text, -1], list(gram))
        state = state_of(automaton, gram)
        assert automaton.counts[state] == len(places)
        assert automaton.latest[state] == places[0]
    tokens = range(max(text) + 1)
    assert sum(state_of(automaton, (one, two)) is not None for one in tokens for two in tokens) == len(
        {gram for gram in grams if len(gram) == 2}
    )
    assert len(automaton.links) <= 2 * len(text)


@pytest.mark.parametrize("seed", some_slow(range(25), range(8, 25)))
@pytest.mark.parametrize("prefer", ["frequent", "recent"])
def test_first_token_follows_the_longest_match(seed, prefer):
    memory = SuffixCache(GramOptions(prefer=prefer)).open()
    text = random_text(seed, 70, vocabulary=4)
    for end in range(len(text)):
        memory.read([text[end]])
        so_far = text[: end + 1]
        longest = longest_match(so_far, len(so_far))
        place = memory.end()
        assert place[1] == longest
        proposed = [token for token, _ in memory.ways(place, 6)]
        assert bool(proposed) == bool(longest)
        if not proposed:
            continue
        following = [so_far[after] for after in places_after(so_far, so_far[-longest:])]
        wanted = max(following, key=lambda token: (following.count(token), -following.index(token)))
        assert proposed[0] == (wanted if prefer == "frequent" else following[0])
        assert set(proposed[: len(set(following))]) == set(following), "what followed the longest match comes first"


def test_continuations_branch_where_the_text_did():
    memory = SuffixCache(GramOptions()).open()
    memory.read([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 9, 1, 2])
    place = memory.end()
    assert [token for token, _ in memory.ways(place, 1)] == [3]
    assert [token for token, _ in memory.ways(memory.step(place, 3), 2)] == [4, 5]


def test_recent_and_frequent_differ():
    text = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1]
    first = {}
    for prefer in ("frequent", "recent"):
        memory = SuffixCache(GramOptions(prefer=prefer)).open()
        memory.read(text)
        first[prefer] = memory.ways(memory.end(), 1)[0][0]
    assert first == {"frequent": 2, "recent": 3}


def test_repetitive_text_is_read_in_linear_time():
    automaton = SuffixAutomaton()
    automaton.extend([1] * 20_000)  # a quadratic automaton would take minutes
    assert len(automaton.links) == 20_001
    assert automaton.sizes[automaton.links[automaton.whole]] == 19_999


def test_best_paths_come_in_order_of_their_cost():
    costs = {0: [(0.1, 1, 1), (2.0, 2, 2)], 1: [(0.1, 3, 3), (0.5, 4, 3)], 2: [(0.0, 5, 3)], 3: []}
    assert list(best_paths(0, costs.__getitem__, 4)) == [(1, 3), (1, 4), (2, 5)]
    assert list(best_paths(0, costs.__getitem__, 1)) == [(1,), (2,)]
    assert list(best_paths(3, costs.__getitem__, 4)) == []
