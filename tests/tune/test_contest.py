"""Contests of candidates whose speeds were planted."""

import itertools
import random

import pytest

from polydraft.tune.contest import LEAST_LAPS, Candidate, Lap, hold_contest, planned_turns, schedule, winner

SPEEDS = {"a": 0.5, "b": 1.3, "c": 1.1, "d": 0.9, "e": 1.6, "f": 1.55, "g": 1.0, "h": 0.7, "i": 1.2}


def held(speeds: dict[str, float], noise: float = 0.0, patience: int = 10**6) -> tuple[Candidate, dict[str, Candidate], list]:
    """Hold a contest in which prompts differ by a factor of two, and a slow lap hits all candidates."""
    plain, rivals, order = Candidate("plain"), {name: Candidate(name) for name in speeds}, []
    wobble, asked = random.Random(0), itertools.count()

    def run(candidate: Candidate, lap: int) -> Lap:
        order.append((candidate, lap))
        speed = speeds.get(candidate.name, 1.0) * (1 + lap % 2) * wobble.uniform(1 - noise, 1 + noise)
        return Lap(64, 64 / (100 * speed), 32)

    finalists = hold_contest(plain, list(rivals.values()), run, lambda: next(asked) >= patience)
    return plain, rivals, [order, finalists]


def test_the_fastest_wins_and_the_slow_stop_early() -> None:
    plain, rivals, (order, finalists) = held(SPEEDS, noise=0.02)
    best = winner(plain, finalists)
    assert best is rivals["e"] and {one.name for one in finalists} == {"e", "f"}
    assert best.speedup(plain)[0] == pytest.approx(1.6, rel=0.02) and best.rate > plain.rate
    assert len(rivals["a"].laps) == 2 < len(rivals["b"].laps) < len(best.laps) == len(plain.laps)
    assert len(order) == planned_turns(len(SPEEDS))


def test_candidates_take_turns_on_the_same_prompts() -> None:
    plain, rivals, (order, _) = held(SPEEDS)
    laps = [[one for one, _ in group] for _, group in itertools.groupby(order, key=lambda turn: turn[1])]
    assert len(laps) == len(plain.laps) and all(lap[0] is plain and len({*lap}) == len(lap) for lap in laps)
    # However prompts differ, a candidate is compared with plain decoding on those that it wrote.
    for name, speed in SPEEDS.items():
        assert rivals[name].speedup(plain) == pytest.approx((speed,) * 3)


def test_nothing_slower_than_plain_is_ever_picked() -> None:
    plain, _, (_, finalists) = held({name: 0.97 for name in SPEEDS})
    assert finalists and winner(plain, finalists) is plain
    # Nor what may be: the interval reaches below 1.
    plain, _, (_, finalists) = held({"a": 1.02, "b": 0.98}, noise=0.3)
    assert max(finalists, key=lambda one: one.rate).speedup(plain)[1] < 1 and winner(plain, finalists) is plain


@pytest.mark.parametrize("patience", [0, 3, 9])
def test_time_runs_out_after_a_whole_lap(patience: int) -> None:
    plain, rivals, (_, finalists) = held(SPEEDS, patience=patience)
    assert len(plain.laps) == LEAST_LAPS + patience
    assert all(len(one.laps) == len(plain.laps) for one in finalists) and winner(plain, finalists) is rivals["e"]


def test_half_as_many_rivals_run_more_laps() -> None:
    assert list(schedule(9)) == [(9, 2), (5, 4), (3, 8), (2, 12)]
    assert list(schedule(2)) == [(2, 12)]


def test_texts_that_end_at_once_break_nothing() -> None:
    plain, empty = (Candidate(name, laps=[Lap(0, 0.0, 0)] * 3) for name in ("plain", "x"))
    assert empty.tokens_per_pass == empty.rate == 0 and empty.speedup(plain)[0] == 1 and winner(plain, [empty]) is plain
