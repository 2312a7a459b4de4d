"""The choice among static trees by what rounds take: the best one is found soon, whatever the number of rows."""

import pytest

from polydraft.draft.ladder import AGAIN, Timings
from polydraft.draft.tree_choice import FAIR, TreeChoice, trees_by_load
from polydraft.lab.theory import cost_curve, tree_tokens
from polydraft.trees import Topology, parse_tree

LARGEST = parse_tree("4x2x2x1x1")
TREES = trees_by_load(LARGEST)
# Free up to some hundred tokens, by the token from there on.
GPU = cost_curve({1: 1.0, 128: 1.1, 256: 1.5, 512: 2.6, 4096: 20.0})
ROWS = [2, 4, 8, 16, 32, 64]


class Machine:
    """Rounds that take the time that their trees and rows say."""

    def __init__(self, rows: int, acceptance: float = 1.0) -> None:
        self.rows, self.acceptance, self.now = rows, acceptance, 0.0

    def clock(self) -> float:
        return self.now

    def tokens(self, tree: Topology) -> float:
        return 1 + self.acceptance * (tree_tokens(tree, FAIR) - 1)

    def seconds(self, tree: Topology) -> float:
        return GPU(self.rows * tree.num_nodes) + 0.04 * tree.depth + 0.02

    def rate(self, tree: Topology) -> float:
        return self.tokens(tree) / self.seconds(tree)

    def run(self, choice: TreeChoice, rounds: int) -> list[Topology]:
        used = []
        for _ in range(rounds):
            tree = choice.trees[choice.place]
            used.append(tree)
            self.now += self.seconds(tree)
            choice.settle(self.rows, [self.tokens(tree) - 1] * self.rows)
        return used


def chosen(machine: Machine, timings: Timings, rounds: int = 120) -> list[Topology]:
    choice = TreeChoice(TREES, timings, machine.rows, machine.clock)
    choice.alone = False
    return machine.run(choice, rounds)


def test_smaller_trees_fit_into_the_largest() -> None:
    assert [str(tree) for tree in TREES] == ["none", "1", "1x1", "1x1x1x1", "2x1x1x1", "4x2x2x1x1"]
    for largest, expected in {
        "2x2": ["none", "1", "1x1", "2x1", "2x2"],
        "chain:3": ["none", "1", "1x1", "1x1x1"],
        "3": ["none", "1", "3"],
        "chain:1": ["none", "1"],
    }.items():
        assert [str(tree) for tree in trees_by_load(parse_tree(largest))] == expected


@pytest.mark.parametrize("acceptance", [0.4, 1.0, 1.4])
@pytest.mark.parametrize("rows", ROWS)
def test_the_best_tree_is_found_and_plain_decoding_is_never_beaten_by_it(rows: int, acceptance: float) -> None:
    machine = Machine(rows, acceptance)
    used = chosen(machine, Timings())
    assert machine.rate(used[-1]) > 0.97 * max(map(machine.rate, TREES))
    assert machine.rate(used[-1]) >= 0.98 * machine.rate(TREES[0])
    again = chosen(machine, Timings(), 60)
    assert again == used[:60], "the same machine, the same choice"


@pytest.mark.parametrize("acceptance", [0.4, 1.0, 1.4])
@pytest.mark.parametrize("rows", ROWS)
def test_a_first_batch_is_no_slower_than_plain_decoding_with_all_its_trials(rows: int, acceptance: float) -> None:
    machine = Machine(rows, acceptance)
    used = chosen(machine, Timings(), 100)
    assert sum(map(machine.tokens, used)) / machine.now > 0.98 * machine.rate(TREES[0])
    assert rows * used[0].num_nodes <= 64 and max(rows * tree.num_nodes for tree in used) <= 256


def test_no_tree_is_kept_that_plain_decoding_beats() -> None:
    class Slow(Machine):
        """Every draft takes as long as a pass, so that short chains are worse than long ones, and all worse than none."""

        def seconds(self, tree: Topology) -> float:
            return super().seconds(tree) + 1.6 * (tree.depth > 0)

    machine = Slow(16)
    used = chosen(machine, Timings())
    assert machine.rate(TREES[1]) < machine.rate(TREES[2]) < machine.rate(TREES[0]) and used[0] == TREES[2]
    assert used[-1] == TREES[0]


def test_what_is_known_is_not_tried_again() -> None:
    timings = Timings()
    last = chosen(Machine(16), timings)[-1]
    assert chosen(Machine(16), timings, 20)[1:] == [last] * 19
    assert chosen(Machine(64), timings)[-1].num_nodes < last.num_nodes


def test_trees_far_beyond_what_pays_are_not_tried() -> None:
    assert LARGEST not in chosen(Machine(64), Timings())[1:]


def test_neighbours_are_tried_again_now_and_then() -> None:
    used = chosen(Machine(16), Timings(), AGAIN + 300)
    late = used[150:]
    assert len(set(late)) > 1 and late[-1] == used[149]


def test_one_slow_round_changes_nothing() -> None:
    machine, timings = Machine(16), Timings()
    choice = TreeChoice(TREES, timings, machine.rows, machine.clock)
    choice.alone = False
    before = machine.run(choice, 120)[-1]
    machine.now += 100.0
    assert machine.run(choice, 30) == [before] * 30
    machine.now += 100.0
    choice.ladder.pause()
    assert machine.run(choice, 30) == [before] * 30


def test_a_row_alone_has_the_largest_tree() -> None:
    machine = Machine(1)
    assert machine.run(TreeChoice(TREES, Timings(), 1, machine.clock), 30) == [LARGEST] * 30


@pytest.mark.parametrize("largest", ["2x1", "2x2", "3x1", "chain:3", "2x1x1", "4x2x1x1x1", "16", "chain:1"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_every_tree_that_rounds_begin_with_is_rehearsed(largest: str, rows: int) -> None:
    choice = TreeChoice(trees_by_load(parse_tree(largest)), Timings(), rows)
    choice.alone = rows == 1
    assert choice.place in choice.kinds(rows) and len(set(choice.kinds(rows))) == len(choice.kinds(rows))


def test_rehearsals_teach_what_rounds_take() -> None:
    machine, timings = Machine(16), Timings()
    for place in range(len(TREES)):
        choice = TreeChoice(TREES, timings, machine.rows, machine.clock)
        choice.rehearsed = place
        assert machine.run(choice, 10) == [TREES[place]] * 10
    used = chosen(machine, timings, 10)
    assert machine.rate(used[-1]) == max(map(machine.rate, TREES)) and len(set(used)) <= 2


def test_rehearsals_say_nothing_of_the_draft() -> None:
    machine, timings = Machine(16), Timings()
    choice = TreeChoice(TREES, timings, machine.rows, machine.clock)
    choice.alone = False
    for place in reversed(range(len(TREES))):
        choice.rehearsed = place
        for _ in range(10):
            machine.now += machine.seconds(TREES[place])
            choice.settle(machine.rows, [0] * machine.rows)  # made-up texts: nothing is accepted
    choice.rehearsed = None
    assert choice.trees[choice.place] == max(TREES, key=machine.rate)


def test_a_draft_that_was_bad_is_tried_again() -> None:
    timings = Timings()
    bad = Machine(64, acceptance=0.05)
    choice = TreeChoice(TREES, timings, bad.rows, bad.clock)
    choice.alone = False
    used = bad.run(choice, 400)
    assert used[-1].num_nodes == 1 and sum(tree.num_nodes == 1 for tree in used[100:]) > 250, "it rests, most of the time"
    good = Machine(64, acceptance=1.2)
    good.now = bad.now
    choice.ladder.clock = good.clock
    assert good.rate(good.run(choice, 2000)[-1]) > max(map(good.rate, TREES)) / 1.02
