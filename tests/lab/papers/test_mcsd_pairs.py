"""MCSD's pairs of other models: rows once they are measured, and left out where their weights are not."""

import json
import runpy
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from polydraft.lab.estimate import Verdict
from polydraft.lab.papers import PAPERS, Results, Run
from polydraft.lab.papers.mcsd_pairs import CHAIN, FOUR, ONE, PAIRS, TREE, TUNED, UNRELATED, pair_claims, pairs_table
from polydraft.lab.papers.pages import measured

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "mcsd_pairs.py"


def results_of(**alphas: tuple[float, float]) -> Results:
    settings = {
        "target": "t",
        "draft": "d",
        "dtype": "float32",
        "machine": "m",
        "max_new_tokens": 4,
        "prompts": 2,
        "source": "s",
    }
    return Results({
        f"{name}-alpaca-t1": {
            "settings": settings,
            "methods": {ONE: {"acceptance_rate": one}, FOUR: {"acceptance_rate": four}, TREE: {"tokens_per_pass": 2.5}},
        }
        for name, (one, four) in alphas.items()
    })  # fmt: skip


def test_pairs_are_rows_once_they_are_measured() -> None:
    assert measured(pairs_table(Results())) == []
    results = results_of(**{UNRELATED.name: (0.2, 0.4), TUNED.name: (0.5, 0.75)})
    rows = measured(pairs_table(results))
    assert [row[0] for row in rows] == [UNRELATED.about, TUNED.about]
    assert rows[1][1:4] == ["1", "0.50 → 0.75", "– → –"] and rows[1][5] == "2.50"
    claims = {row[0]: row for row in pair_claims(results)}
    assert "fine-tuned 0.500, as it was 0.200" in claims["fine-tuning a draft raises α (T=1)"][1]
    gain = "several candidates gain more after fine-tuning: α@4 − α@1 (T=1)"
    assert "0.250" in claims[gain][1] and claims[gain][2] == Verdict.UNBOUNDED
    for run in results.values():
        for figures in run["methods"].values():
            for key, value in [*figures.items()]:
                figures |= {f"{key}_low": value - 0.01, f"{key}_high": value + 0.01}
    assert {row[0]: row for row in pair_claims(results)}[gain][2] == Verdict.YES, "differences keep their intervals"


def test_every_pair_has_runs_of_its_own() -> None:
    names = [run.name for run in PAPERS.get("mcsd").runs]
    assert len(names) == len(set(names))
    for pair in PAIRS:
        assert {run.settings["draft"] for run in pair.runs} == {pair.draft}
        assert all((run.needs == ()) == (pair.target is None) for run in pair.runs)
        assert any(CHAIN in run.methods for run in pair.runs)


def test_runs_are_left_out_whose_models_are_not_there_or_not_asked_for(
    invoke, tiny: str, tmp_path: Path, registered: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    there = {"target": tiny, "draft": "early-exit:2"}
    runs = (
        Run(name="there", prompts="p", temperature=1.0, methods=(ONE, FOUR), settings=there, needs=(tiny,)),
        Run(name="not-there", prompts="p", temperature=1.0, methods=(ONE,), settings=there, needs=(f"{tmp_path}/no",)),
    )
    registered(PAPERS, "mcsd", replace(PAPERS.get("mcsd"), runs=runs))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    options = ("--prompts", str(prompts), "--max-new-tokens", "4", "--device", "cpu")
    code, _, err = invoke("bench", "--reproduce", "mcsd", *options, "--out", str(tmp_path / "one"))
    assert code == 0, err
    assert "leaving out not-there and others like it: there is no" in caplog.text
    assert [path.name for path in (tmp_path / "one").iterdir() if path.is_dir()] == ["there"]
    code, _, err = invoke("bench", "--reproduce", "mcsd", "--target", tiny, *options, "--out", str(tmp_path / "two"))
    assert code == 0, err
    assert not [path for path in (tmp_path / "two").iterdir() if path.is_dir()], "the user's own pair is all that is measured"


def test_a_model_of_llama2_c_is_read_as_it_computes(tmp_path: Path) -> None:
    """Against llama2.c's own forward pass, in a few lines: neighbouring channels turn."""
    size, inner, layers, heads, vocabulary, positions = 16, 24, 2, 2, 11, 8
    channels, generator = size // heads, torch.Generator().manual_seed(0)
    shapes = {
        "embedding": (vocabulary, size), "norm1": (layers, size), "q": (layers, size, size), "k": (layers, size, size),
        "v": (layers, size, size), "o": (layers, size, size), "norm2": (layers, size), "gate": (layers, inner, size),
        "down": (layers, size, inner), "up": (layers, inner, size), "norm": (size,), "angles": (2, positions, channels // 2),
    }  # fmt: skip
    weights = {name: torch.randn(shape, generator=generator) / size**0.5 for name, shape in shapes.items()}
    numbers = torch.cat([weight.flatten() for weight in weights.values()]).numpy().astype("<f4").tobytes()
    file = tmp_path / "model.bin"
    file.write_bytes(struct.pack("7i", size, inner, layers, heads, heads, vocabulary, positions) + numbers)

    tokens_T = torch.tensor([3, 1, 4, 1, 5])
    angles_TC = torch.arange(5)[:, None] * 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    turn_TC = torch.polar(torch.ones_like(angles_TC), angles_TC)[:, None]

    def turned(rows_TH: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(rows_TH.view(5, heads, -1, 2).contiguous())
        return torch.view_as_real(pairs * turn_TC).flatten(-2).transpose(0, 1)

    hidden = weights["embedding"][tokens_T]
    for layer in range(layers):
        part = {name: weight[layer] for name, weight in weights.items() if len(weight) == layers}
        normed = functional.rms_norm(hidden, (size,), part["norm1"], 1e-5)
        query, key, value = (normed @ part[name].T for name in "qkv")
        mixed = functional.scaled_dot_product_attention(
            turned(query), turned(key), value.view(5, heads, -1).transpose(0, 1), is_causal=True
        )
        hidden = hidden + mixed.transpose(0, 1).flatten(1) @ part["o"].T
        normed = functional.rms_norm(hidden, (size,), part["norm2"], 1e-5)
        hidden = hidden + (functional.silu(normed @ part["gate"].T) * (normed @ part["up"].T)) @ part["down"].T
    expected = functional.rms_norm(hidden, (size,), weights["norm"], 1e-5) @ weights["embedding"].T

    model = runpy.run_path(str(SCRIPT))["read_llama2c"](file)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_T[None]).logits[0], expected, rtol=1e-4, atol=1e-4)
