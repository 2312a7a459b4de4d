"""`--compare`: arms that differ in their drafts alone, and what is said about them."""

from pathlib import Path

import pytest

from polydraft.backends.native import kernels
from polydraft.cli.comparison import break_even_line
from polydraft.engine import Decoder, Stats

SAME = ("target", "tokenizer", "eos_token_ids", "walk", "graphs", "ahead")
SETTINGS = ("--set", "graphs=no", "--max-new-tokens", "6", "--compare")


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Decoder]:
    """Decoders that a command asks for a stream, or for the memories of beams, in turn."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    found: list[Decoder] = []
    stream, assembler = Decoder.stream, Decoder.assembler

    def seen(decoder: Decoder, *arguments, **options):
        found.append(decoder)
        return stream(decoder, *arguments, **options)

    def asked(decoder: Decoder, *arguments):
        if not found or found[-1] is not decoder:
            found.append(decoder)
        return assembler(decoder, *arguments)

    monkeypatch.setattr(Decoder, "stream", seen)
    monkeypatch.setattr(Decoder, "assembler", asked)
    return found


def test_arms_differ_in_their_drafts_alone(invoke, tiny: str, arms: list[Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.cli.comparison.rested", lambda stats: True)
    options = ("--draft", "early-exit:1", "--tree", "dynamic:8", "--walk", "node", "--draft-temperature", "0.5")
    code, _, err = invoke("generate", "hello", "--target", tiny, *options, *SETTINGS)
    assert code == 0, err
    plain, dynamic, restless = arms = list(dict.fromkeys(arms))  # each is warmed up first
    assert [arm.drafter.name for arm in arms] == ["none", "dynamic", "model"]
    assert (dynamic.graphs, dynamic.walk) == (False, "node")
    for arm in (plain, restless):
        assert [getattr(arm, name) for name in SAME] == [getattr(dynamic, name) for name in SAME]
    assert restless.drafter.draft_temperature == dynamic.drafter.draft_temperature == 0.5
    assert restless.drafter.decision is dynamic.drafter.decision


def test_a_drafting_arm_keeps_its_decision_model(arms: list[Decoder], tiny: str) -> None:
    from polydraft import load
    from polydraft.cli.comparison import drafting_always
    from polydraft.draft.stopping_builder import Decision

    class Endless(Decision):
        def goes_on(self, features_BGF, logits_BGV):
            return features_BGF.new_ones(len(features_BGF), dtype=bool)

    decoder = load(tiny, "early-exit:1", tree="dynamic:8")
    decoder.drafter.decision = Endless()
    restless = drafting_always(decoder)
    assert restless is not None and restless.drafter.decision is decoder.drafter.decision


def test_beams_are_compared_with_beams_of_the_same_decoder(invoke, tiny: str, arms: list[Decoder]) -> None:
    code, _, err = invoke("generate", "hello", "--target", tiny, "--draft", "early-exit:1", "--beams", "2", *SETTINGS)
    assert code == 0, err
    plain, drafted = arms
    assert [arm.drafter.name for arm in arms] == ["none", "dynamic"] and not drafted.graphs
    assert [getattr(plain, name) for name in SAME] == [getattr(drafted, name) for name in SAME]


def test_hugging_face_is_an_arm_wherever_it_can_be_asked_for_the_same_text(invoke, tiny: str) -> None:
    base = ("generate", "hello", "--target", tiny, "--draft", "none", "--max-new-tokens", "6", "--compare")
    code, out, err = invoke(*base, "--temperature", "0")
    assert code == 0 and "Hugging Face generate gives the same text" in out, (out, err)
    assert out.index("Hugging Face generate") < out.index("plain")
    code, out, _ = invoke(*base, "--temperature", "0.8", "--top-p", "0.9")
    assert code == 0 and "Hugging Face" in out and "identical" not in out
    code, out, _ = invoke(*base, "--dtype", "int8")  # weights that `generate` cannot multiply by itself
    assert ("Hugging Face" not in out) and code == (0 if kernels() is not None else 2)


def stats(rounds: int, seconds: float, offered: int) -> Stats:
    found = Stats()
    found.rounds, found.total_seconds, found.offers_by_depth = rounds, seconds, [offered] if offered else []
    found.seconds["draft"] = 0.25 * seconds
    return found


def test_what_a_round_must_yield_is_said_where_rounds_had_drafts() -> None:
    drafted = stats(32, 6.4, 30)
    drafted.seconds["verify"] = 1.28
    line = break_even_line(stats(64, 6.4, 0), drafted)
    assert (
        "takes 2.0 plain passes" in line
        and "(drafting 0.5, target 0.0, verification 0.4)" in line
        and "pays above 2.0 tokens/pass" in line
        and "does not pay" in line
    )


def test_rounds_that_are_replayed_as_a_whole_are_not_split() -> None:
    drafted = stats(32, 6.4, 30)
    drafted.replayed_rounds = 30
    assert "plain passes on this machine, so it pays" in break_even_line(stats(64, 6.4, 0), drafted)


def test_a_drafter_that_rests_is_no_measure_of_a_round_with_drafts() -> None:
    for offered in (0, 2):
        line = break_even_line(stats(64, 6.4, 0), stats(62, 6.8, offered))
        assert line.startswith(f"{offered} of 62 rounds had drafts") and "pays above" not in line
