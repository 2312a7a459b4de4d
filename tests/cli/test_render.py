"""What is said about a comparison with plain decoding."""

from polydraft.cli.terminal import break_even_line
from polydraft.engine import Stats


def stats(rounds: int, seconds: float, offered: int) -> Stats:
    found = Stats()
    found.rounds, found.total_seconds, found.offers_by_depth = rounds, seconds, [offered] if offered else []
    found.seconds["draft"] = 0.25 * seconds
    return found


def test_what_a_round_must_yield_is_said_where_rounds_had_drafts() -> None:
    line = break_even_line(stats(64, 6.4, 0), stats(32, 6.4, 30))
    assert "takes 2.0 plain passes" in line and "drafting 0.5" in line and "pays above 2.0 tokens/pass" in line


def test_a_drafter_that_rests_is_no_measure_of_a_round_with_drafts() -> None:
    for offered in (0, 2):
        line = break_even_line(stats(64, 6.4, 0), stats(62, 6.8, offered))
        assert line.startswith(f"{offered} of 62 rounds had drafts") and "pays above" not in line
