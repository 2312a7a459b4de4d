from polydraft.ngrams import ContextCache, GramOptions
from polydraft.ngrams.context import GramTable, GramTables


def memory(**options):
    return ContextCache(GramOptions(**options)).open()


def tokens_of(matches):
    return [list(match.tokens) for match in matches]


def test_longer_prefixes_come_first_then_recent_ones():
    subject = memory(gram=2)
    subject.read([1, 2, 3, 4, 9, 2, 5, 6, 9, 2, 7, 8, 1, 2])
    matches = subject.matches(4, 2)
    assert [(match.prefix, list(match.tokens)) for match in matches] == [(2, [3, 4]), (1, [7, 8]), (1, [5, 6])]


def test_what_is_seen_again_is_recent_again():
    subject = memory(gram=1, max_prefix=1)
    subject.read([1, 2, 1, 3, 1, 2, 1])
    assert tokens_of(subject.matches(4, 1)) == [[2], [3]]


def test_a_prefix_forgets_its_oldest_continuation():
    subject = memory(gram=1, max_prefix=1, entries_per_key=2)
    subject.read([1, 2, 1, 3, 1, 4, 1])
    assert tokens_of(subject.matches(4, 1)) == [[4], [3]]


def test_tables_forget_prefixes_seen_least_recently():
    table = GramTable(max_keys=2, entries_per_key=2)
    table.add([((1,), (2,)), ((3,), (4,)), ((1,), (5,)), ((6,), (7,))])
    assert len(table) == 2
    assert list(table.get((1,))) == [(5,), (2,)] and list(table.get((6,))) == [(7,)]
    assert list(table.get((3,))) == []


def test_memory_is_bounded():
    options = GramOptions(max_keys=30, entries_per_key=2, max_prefix=3)
    tables = GramTables(options)
    tables.add(list(range(1000)), 1000)
    assert len(tables) == 30


def test_branches_are_learnt_with_their_first_tokens_as_prefixes():
    subject = memory()
    subject.read([1, 2])
    assert subject.matches(4, 4) == []
    subject.learn([2, 3, 4, 5, 6])
    assert tokens_of(subject.matches(4, 4)) == [[3, 4, 5, 6]]
    subject.learn([1, 2, 7, 8, 9])
    assert [(match.prefix, list(match.tokens)) for match in subject.matches(4, 4)] == [(2, [7, 8, 9]), (1, [3, 4, 5, 6])]


def test_a_long_branch_is_learnt_in_all_its_parts():
    subject = memory()
    subject.learn([1, 2, 3, 4, 5, 6, 7])
    subject.read([3])
    assert tokens_of(subject.matches(4, 4)) == [[4, 5, 6, 7]]


def test_what_is_learnt_is_no_text():
    subject = memory()
    subject.read([1, 2])
    subject.learn([9, 9, 9, 9, 9])
    subject.learn([2, 3, 4, 5, 6])
    assert tokens_of(subject.matches(4, 4)) == [[3, 4, 5, 6]]


def test_continuations_are_continued():
    subject = memory(gram=2)
    subject.read([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert tokens_of(subject.matches(1, 6)) == [[3, 4, 5, 6, 7, 8]]
