"""Figures with intervals, and the one function that decides about claims."""

import pytest

from polydraft.lab.estimate import Estimate, Verdict, bounds, verdict, with_intervals
from polydraft.lab.papers.paper import ordering, text_of

LOW, MIDDLE, HIGH = Estimate(1.0, 0.9, 1.1), Estimate(1.15, 1.05, 1.25), Estimate(2.0, 1.8, 2.2)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ((HIGH, LOW), Verdict.YES),
        ((LOW, HIGH), Verdict.NO),
        ((MIDDLE, LOW), Verdict.UNDECIDED),
        ((LOW, MIDDLE), Verdict.UNDECIDED),
        ((HIGH, MIDDLE, LOW), Verdict.UNDECIDED),
        ((MIDDLE, LOW, HIGH), Verdict.NO),
        ((HIGH, Estimate.exactly(1.0)), Verdict.YES),
        ((LOW, Estimate.exactly(1.0)), Verdict.UNDECIDED),
        ((HIGH, 1.0), Verdict.UNBOUNDED),
        ((Estimate(2.0), LOW), Verdict.UNBOUNDED),
        ((Estimate(2.0), None), Verdict.UNKNOWN),
        ((Estimate(1.0, 0.9, 1.1), Estimate(1.1, 1.1, 1.2)), Verdict.UNDECIDED),
    ],
)
def test_yes_and_no_need_intervals_that_do_not_overlap(figures: tuple[float | None, ...], found: Verdict) -> None:
    assert verdict(figures) is found


def test_that_figures_are_alike_can_only_be_refuted() -> None:
    assert verdict((HIGH, LOW), alike=True) is verdict((LOW, HIGH), alike=True) is Verdict.NO
    assert verdict((MIDDLE, LOW), alike=True) is Verdict.UNDECIDED


def test_a_claim_is_a_row_of_what_is_said_found_and_decided() -> None:
    row = ordering("a is faster than b", ("a", HIGH), ("b", LOW), digits=1, why="it is")
    assert row == ["a is faster than b", "a 2.0 [1.8, 2.2], b 1.0 [0.9, 1.1]", "yes", "it is"]
    assert ordering("", ("a", None), ("b", LOW))[1:3] == ["a –, b 1.000 [0.900, 1.100]", "not measured"]


def test_an_estimate_is_a_number_with_an_interval() -> None:
    assert HIGH + 1 == 3 and sorted([HIGH, LOW]) == [LOW, HIGH] and bounds(HIGH + 1) is None
    assert bounds(Estimate.of_mean(1.0, 0.5)) == pytest.approx((0.02, 1.98)) and bounds(Estimate.of_mean(1.0, None)) is None
    assert bounds(LOW.scaled(-2)) == pytest.approx((-2.2, -1.8))
    assert text_of(HIGH, "×") == "2.00× [1.80, 2.20]" and text_of(1.0) == text_of(Estimate.exactly(1.0)) == "1.00"
    assert text_of(-0.001) == "0.00" and text_of(-0.1, digits=1) == "-0.1"
    difference = HIGH.minus(LOW)
    assert difference == pytest.approx(1.0) and bounds(difference) == pytest.approx((1 - 0.05**0.5, 1 + 0.05**0.5))
    assert bounds(HIGH.minus(Estimate(1.0))) is None
    assert Estimate.mean_of([HIGH]) == 2.0 and bounds(Estimate.mean_of([HIGH])) == pytest.approx((1.8, 2.2))
    mean = Estimate.mean_of([HIGH, LOW])
    assert mean == pytest.approx(1.5) and bounds(mean) == pytest.approx((1.5 - 0.05**0.5 / 2, 1.5 + 0.05**0.5 / 2))
    assert bounds(Estimate.mean_of([HIGH, Estimate(1.0)])) is None
    ratio = HIGH.over(LOW)
    low, high = bounds(ratio) or (0.0, 0.0)
    assert ratio == pytest.approx(2.0) and 1.8 / 1.1 < low < 1.8 and 2.2 < high < 2.2 / 0.9
    assert bounds(HIGH.over(Estimate(1.0))) is None and HIGH.over(Estimate(4.0)) == 0.5


def test_ends_of_intervals_join_their_figures() -> None:
    figures = with_intervals({
        "speedup": 2.0, "speedup_low": 1.5, "speedup_high": 2.5, "prompts": 3, "alone": 1.0,
        "depths": [0.5, 0.25], "depths_low": [0.4, 0.2], "depths_high": [0.6, 0.3],
        "branches": [{"share": 0.5, "share_low": 0.4, "share_high": 0.6}],
        "categories": {"a": {"speedup": 1.0, "speedup_low": 0.5, "speedup_high": 1.5}},
    })  # fmt: skip
    assert set(figures) == {"speedup", "prompts", "alone", "depths", "branches", "categories"} and figures["prompts"] == 3
    assert bounds(figures["speedup"]) == (1.5, 2.5) and bounds(figures["alone"]) is None
    assert [bounds(one) for one in figures["depths"]] == [(0.4, 0.6), (0.2, 0.3)]
    assert bounds(figures["branches"][0]["share"]) == (0.4, 0.6) and bounds(figures["categories"]["a"]["speedup"]) == (0.5, 1.5)
