"""What every registered cache promises."""

import dataclasses
import sys

import pytest

from covering import some_slow
from polydraft.errors import UsageError
from polydraft.ngrams import GRAM_CACHES, GramOptions

from .brute import places_after, random_text

every_cache = pytest.mark.parametrize("name", list(GRAM_CACHES))


def proposals(memory, depth=4):
    """All that a memory proposes: paths with the chance of their last token."""
    found, front = {}, {(): memory.end()}
    for _ in range(depth):
        front = {
            (*path, token): (memory.step(place, token), found.setdefault((*path, token), chance))[0]
            for path, place in front.items()
            for token, chance in memory.ways(place, 3)
        }
    return found


@pytest.mark.parametrize("name", ["context", "corpus"])
@pytest.mark.parametrize("seed", some_slow(range(20), range(6, 20)))
def test_continuations_keep_their_bounds_and_differ(name, options, seed):
    memory = GRAM_CACHES.get(name)(options).open()
    text = random_text(seed, 120, vocabulary=6)
    memory.read(text)
    for count, length in ((1, 1), (3, 5), (6, 12), (50, 2)):
        matches = memory.matches(count, length)
        assert len(matches) <= count
        assert len({tuple(match.tokens) for match in matches}) == len(matches)
        assert all(1 <= len(match.tokens) <= length and match.prefix >= 1 for match in matches)


@every_cache
@pytest.mark.parametrize("seed", some_slow(range(20), range(6, 20)))
def test_ways_are_what_followed_the_longest_end_of_text_and_path(name, options, seed):
    memory = GRAM_CACHES.get(name)(options).open()
    text = random_text(seed, 120, vocabulary=6)
    memory.read(text)
    place, path = memory.end(), []
    for step in range(8):
        ways = memory.ways(place, 3)
        assert len(ways) <= 3 and len(dict(ways)) == len(ways)
        assert all(0 < chance < 1 for _, chance in ways)
        assert ways == memory.ways(place, 8)[:3], "asking changes nothing"
        # The text itself does not grow with the path, so a match may end in it only.
        most = options.max_match if name != "suffix" else 99
        sizes = range(min(most, len(text) + len(path)), 0, -1)
        matched = next((size for size in sizes if places_after(text, [*text, *path][-size:])), 0)
        if name == "corpus":
            other = GRAM_CACHES.get(name)(options).open()
            other.read([*text, *path])
            assert ways == other.ways(other.end(), 3), "a path is as good as text"
        elif matched and len(path) + matched < most:  # a longer match may have begun before the path
            followers = {text[at] for at in places_after(text, [*text, *path][-matched:])}
            assert ways[0][0] in followers
        if not ways:
            break
        token = ways[(seed + step) % len(ways)][0]
        place, path = memory.step(place, token), [*path, token]
    assert path, "nothing was proposed"


@every_cache
@pytest.mark.parametrize("seed", range(10))
def test_reading_in_parts_is_reading_at_once(name, options, seed):
    cache = GRAM_CACHES.get(name)(options)
    text = random_text(seed, 150, vocabulary=5)
    parts, whole = cache.open(), cache.open()
    place = 0
    for step in range(150):
        size = (seed + step) % 4
        parts.read(text[place : place + size])
        place += size
    whole.read(text[:place])
    assert proposals(parts) == proposals(whole)


@every_cache
def test_rows_know_nothing_of_each_other_and_forget_when_told(name, options):
    cache = GRAM_CACHES.get(name)(options)
    one, other = cache.open(), cache.open()
    one.read([25, 26, 27, 28, 29, 30, 25, 26])
    before = proposals(one)
    other.read([25, 26])
    other.learn([25, 26, 1, 1, 1])
    assert proposals(one) == before
    assert all(27 not in path for path in proposals(other))
    one.reset()
    assert proposals(one) == {}
    one.read([25, 26])
    assert proposals(one) == {}


@every_cache
def test_nothing_is_known_of_nothing(name, options):
    memory = GRAM_CACHES.get(name)(options).open()
    for tokens in ([], [21], [], [22], [23]):
        memory.read(tokens)
        assert proposals(memory) == {}


@every_cache
def test_degenerate_text_takes_no_longer(name, options):
    def work(text):
        """Count the lines of this package that reading and proposing take."""
        memory, lines = GRAM_CACHES.get(name)(options).open(), 0

        def count(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return count if "polydraft" in frame.f_code.co_filename else None

        before = sys.gettrace()
        sys.settrace(count)
        try:
            memory.read(text)
            proposed = proposals(memory, 6)
        finally:
            sys.settrace(before)
        return lines, proposed

    half, _ = work([3] * 1000)
    lines, proposed = work([3] * 2000)
    assert lines < 2.1 * half, "reading takes a time that grows with the text alone"
    if name == "corpus":
        short = GRAM_CACHES.get(name)(options).open()
        short.read([3] * options.max_prefix)
        assert proposed == proposals(short, 6) != {}
    else:
        assert max(proposed, key=len) == (3,) * 6


def test_options_out_of_range_are_refused():
    for name, value in (
        ("gram", 0),
        ("max_prefix", -1),
        ("entries_per_key", 0),
        ("max_match", 0),
        ("prefer", "x"),
        ("gram", 99),
    ):
        with pytest.raises(UsageError, match=r"out of range|unknown"):
            dataclasses.replace(GramOptions(), **{name: value})
