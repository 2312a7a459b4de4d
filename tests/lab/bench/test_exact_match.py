"""Right answers are recognised, and wrong ones are not."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from polydraft.lab.bench.session import is_exact_match


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("She has 3 + 4 = 7 apples. So the answer is 7.", ("7",), True),
        ("That makes $1,234.00 in all.", ("1234",), True),
        ("7 or 8", ("7",), False),
        ("no number", ("7",), False),
        ("-3", ("-3",), True),
        ("The Eiffel Tower!", ("eiffel tower", "Tour Eiffel"), True),
        ("It is the Eiffel Tower", ("eiffel tower",), False),
        ("", ("red",), False),
    ],
)
def test_matches(text: str, answers: tuple[str, ...], right: bool) -> None:
    assert is_exact_match(text, answers) is right


def test_a_benchmark_of_answers_has_a_column(invoke, tiny: str, tmp_path: Path) -> None:
    """The tiny model's text is unknown beforehand: take it for the answer to one prompt, and something else for the other's."""
    prompts = tmp_path / "prompts.jsonl"
    place = ("--device", "cpu", "--dtype", "float32")
    options = ("--target", tiny, "--draft", "none", "--methods", "ar", "--max-new-tokens", "4", *place)
    prompts.write_text(json.dumps({"context": "a", "question": "b"}) + "\n")
    code, out, err = invoke("bench", *options, "--prompts", str(prompts), "--out", str(tmp_path / "one"))
    assert code == 0, err
    assert "exact match" not in out
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    assert results["methods"]["ar"]["exact_match"] is None
    tokens = json.loads((tmp_path / "one" / "runs.jsonl").read_text())["token_ids"]
    said = AutoTokenizer.from_pretrained(tiny).decode(tokens, skip_special_tokens=True)
    rows = [{"context": "a", "question": "b", "answers": {"text": [answer]}} for answer in (said, f"{said} not this")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = invoke("bench", *options, "--prompts", str(prompts), "--out", str(tmp_path / "two"))
    assert code == 0, err
    assert "exact match" in out
    assert json.loads((tmp_path / "two" / "results.json").read_text())["methods"]["ar"]["exact_match"] == 0.5
