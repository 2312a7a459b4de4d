import io
import json

import pytest

from polydraft.models import Context

SMALL = ["--max-new-tokens", "8", "--tree", "2x1", "--draft", "early-exit:1"]


def talk(invoke, monkeypatch: pytest.MonkeyPatch, tiny: str, lines: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return invoke("chat", "--target", tiny, *SMALL)


def test_second_turn_answers_in_the_light_of_the_first(invoke, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    code, out, _ = talk(invoke, monkeypatch, tiny, "hi\nwell\n")
    first, second = out.splitlines()[:2]
    raw = f"<user>hi</><assistant>{first}</><user>well</><assistant>"
    code_raw, expected, _ = invoke("generate", raw, "--raw", "--target", tiny, *SMALL, "--json")
    assert code == code_raw == 0
    assert second == json.loads(expected)["text"]


def test_later_turns_read_only_what_is_new(invoke, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    read: list[int] = []
    prefill = Context.prefill

    def counting(context: Context, texts: list[list[int]], observer=None) -> None:
        read.append(sum(map(len, texts)))
        prefill(context, texts, observer)

    monkeypatch.setattr(Context, "prefill", counting)
    talk(invoke, monkeypatch, tiny, "a first question that is a good deal longer, so there!\nmore\n")
    target_first, _, target_second, _ = read
    assert target_second < target_first


def test_reset_forgets(invoke, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    _, out, _ = talk(invoke, monkeypatch, tiny, "hi\n/reset\nhi\n")
    first, second = out.splitlines()[:2]
    assert first == second


def test_commands_and_end_of_input(invoke, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    code, out, err = talk(invoke, monkeypatch, tiny, "/stats\n/what\n\n/exit\nnever read\n")
    assert code == 0
    assert out == "no answer yet\n"
    assert "unknown command /what" in err
