import pytest

from polydraft.ngrams import GramOptions, LookupCache
from polydraft.ngrams.lookup import copied

from .brute import longest_match, places_after, random_text


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("max_match", [1, 2, 4])
def test_agrees_with_a_search_through_the_text(seed, max_match):
    subject = LookupCache(GramOptions(max_match=max_match)).open()
    text = random_text(seed, 80, vocabulary=8)
    for end in range(len(text)):
        subject.read(text[end : end + 1])
        so_far = text[: end + 1]
        longest = longest_match(so_far, max_match)
        wanted = []
        for size in range(longest, 0, -1):
            for place in places_after(so_far, so_far[-size:]):
                continuation = tuple(copied(so_far, place, 3))
                if continuation not in [tokens for _, tokens in wanted]:
                    wanted.append((size, continuation))
        assert [(match.prefix, match.tokens) for match in subject.matches(5, 3)] == wanted[:5]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert copied([1, 2, 3], 1, 5) == [2, 3, 2, 3, 2]
    assert copied([1, 2, 3], 2, 1) == [3]
    subject = LookupCache(GramOptions()).open()
    subject.read([7, 1, 2, 1, 2, 1])
    assert list(subject.propose(1, 5)[0]) == [2, 1, 2, 1, 2]
