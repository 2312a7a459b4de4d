"""The rule by which combinations are left to the slow tests."""

from itertools import product

import pytest

from covering import all_slow, chosen, covering, keeping, some_slow


@pytest.mark.parametrize(("sizes", "strength", "most"), [([5, 3], 1, 5), ([3, 7], 1, 7), ([6, 4, 2], 2, 26), ([2, 3], 2, 6)])
def test_all_values_meet(sizes: list[int], strength: int, most: int) -> None:
    found = chosen(list(product(*map(range, sizes))), strength)
    assert max(sizes) <= len(set(found)) == len(found) <= most
    for number, size in enumerate(sizes):
        counts = [sum(one[number] == place for one in found) for place in range(size)]
        assert min(counts) > 0 and max(counts) <= min(counts) + 2, "values take turns"
    if strength == 2:
        for first, second in ((a, b) for b in range(len(sizes)) for a in range(b)):
            assert {(one[first], one[second]) for one in found} == set(product(range(sizes[first]), range(sizes[second])))


def test_every_combination_is_there_and_the_rest_is_slow() -> None:
    made = covering(["a", "b"], [("c", 1), ("d", 2), ("e", 3)])
    assert [one.values for one in made] == [
        (letter, *pair) for letter in ("a", "b") for pair in (("c", 1), ("d", 2), ("e", 3))
    ]  # fmt: skip
    assert sum(not one.marks for one in made) == 3


def test_slow_ones_are_named() -> None:
    made = some_slow([("a", 1), "b", "c"], {"b"})
    assert [(one.values, bool(one.marks)) for one in made] == [(("a", 1), False), (("b",), True), (("c",), False)]
    assert [(one.values, bool(one.marks)) for one in all_slow(["a"], [1, 2])] == [(("a", 1), True), (("a", 2), True)]
    with pytest.raises(AssertionError, match="'d'"):
        some_slow(["a", "b"], ["d"])


def test_what_is_kept_by_name_is_there_and_the_rest_is_slow() -> None:
    made = keeping(["a", ("b", 1), ["c"]], ("b", 1), ["c"])
    assert [one.values for one in made] == [("a",), ("b", 1), (["c"],)]
    assert [bool(one.marks) for one in made] == [True, False, False]
    with pytest.raises(AssertionError, match="nothing to keep"):
        keeping(["a"], "b")
