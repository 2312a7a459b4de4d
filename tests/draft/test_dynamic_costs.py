"""Costs that dynamic trees are chosen by: what noise may do to them, and what a table means."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from polydraft.certify.reference import echo_pair
from polydraft.draft import costs as measured
from polydraft.draft.costs import costs_of, measure, measured_costs, rising

NOISY = {1: 44.2, 4: 55.2, 8: 47.5, 16: 49.9, 24: 59.6}
"""Milliseconds as one busy machine gave them: a pass of 4 tokens slower than one of 16."""


def test_times_that_fall_are_evened_out_and_others_stay() -> None:
    smooth = rising(NOISY)
    assert all(small <= large for small, large in pairwise(smooth.values()))
    assert smooth[1] == 44.2 and smooth[24] == 59.6
    assert smooth[4] == smooth[8] == smooth[16] == pytest.approx((55.2 + 47.5 + 49.9) / 3)
    assert rising({1: 1.0, 2: 1.0, 4: 3.0}) == {1: 1.0, 2: 1.0, 4: 3.0}
    assert set(rising({1: 3.0, 2: 2.0, 4: 1.0}).values()) == {2.0}


TABLE = {"target": {"1": 30.0, "8": 40.0}, "level": {"tree": 5.0}, "draw": {"token": 2.0}, "host": {"root": 8.0}}


def test_costs_are_in_plain_rounds() -> None:
    costs = costs_of(TABLE)  # a plain round: 30, the draw 2, the host 8
    assert (costs.draft_level, costs.overhead) == (pytest.approx(13 / 40), 0)
    assert costs.tree_pass(1) == 1 and costs.tree_pass(8) == 50 / 40
    assert costs_of({**TABLE, "grams": True}).draft_level == 5 / 40, "they are looked up once, whatever the depth"
    assert costs_of({**TABLE, "root": {"pass": 4.0}}).overhead == 4 / 40


def test_a_captured_round_needs_no_host() -> None:
    costs = costs_of({**TABLE, "captured": True})
    assert (costs.draft_level, costs.tree_pass(8)) == (5 / 32, 42 / 32)


def test_a_table_is_measured_kept_and_measured_again_if_it_is_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "_tables", {})
    monkeypatch.setattr(measured, "_SECONDS", 0.0)
    monkeypatch.setattr(measured, "_DISTURBED", math.inf)
    pair = echo_pair()
    for nodes, sizes in ((2, {"1", "4"}), (4, {"1", "4"}), (8, {"1", "4", "8"})):
        table = measure(pair.target, pair.draft, nodes)
        assert set(table["target"]) == sizes and costs_of(table).draft_level > 0
    times = [measured_costs(pair.target, pair.draft, 8).draft_level for _ in range(2)]
    assert times[0] == times[1] > 0
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text('{"target": {"1": 1.0}, "level": {"tree": 0.1}}')
    monkeypatch.setattr(measured, "_tables", {})
    measured_costs(pair.target, pair.draft, 8)
    assert '"draw"' in file.read_text()


def test_what_a_busy_machine_says_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "_tables", {})
    monkeypatch.setattr(measured, "_SECONDS", 0.0)
    monkeypatch.setattr(measured, "_DISTURBED", 0.0)
    pair = echo_pair()
    costs = [measured_costs(pair.target, pair.draft, 8).draft_level for _ in range(2)]
    assert costs[0] == costs[1], "within a process they stay what they are"
    assert not (tmp_path / "costs").exists()
