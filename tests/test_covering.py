"""The rule by which combinations are left to the slow tests."""

from itertools import product

import pytest

from covering import chosen, covering


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
