import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polydraft.engine.stats import PHASES
from polydraft.errors import UsageError
from polydraft.lab.bench._results import summarise
from polydraft.lab.bench._runner import EnergyBlock, Journal, Measurement, Runner
from polydraft.lab.bench.method import METHODS, Bench, Method, MethodSpec, Token
from polydraft.lab.bench.report.values import speedup, speedup_verdict
from polydraft.lab.bench.session import BenchOptions, BenchSession
from polydraft.lab.papers import PAPERS, Paper, Run
from polydraft.models.inflated import SHAPES, BigShape
from polydraft.models.loading import load_draft, load_model
from polydraft.papers.decision import DecisionKind, DecisionModel, DecisionShape, save_decision

TEXTS = ["hello", "a tree", "why", "so"]
PROMPTS = [{"id": f"p{number}", "category": "ab"[number % 2], "prompt": text} for number, text in enumerate(TEXTS)]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return str(path)


def bench(invoke, tiny: str, prompt_file: str, out: Path, *options: str) -> tuple[int, str, str]:
    small = ("--max-new-tokens", "10", "--draft", "early-exit:2", "--target", tiny, "--prompts", prompt_file)
    return invoke("bench", *small, "--out", str(out), *options)


def test_results_and_report_are_written_and_texts_are_identical(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    names = [
        "ar",
        "auto",
        "sd:2",
        "mcsd:2x1,scheme=naive,walk=node",
        "fork:2x2",
        "mcsd:2x1,attention=flat",
        "hf",
        "hf-assisted:2",
        "hf-lookup:2",
    ]
    code, out, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", " ".join(names), "--repeat", "2")
    assert code == 0, err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["schema"] == 1 and list(results["methods"]) == names
    assert results["settings"]["prompts"] == {"source": prompt_file, "count": 4, "categories": {"a": 2, "b": 2}}
    assert results["methods"]["ar"]["speedup"] == 1
    tokens = {figures["tokens"] for figures in results["methods"].values()}
    assert len(tokens) == 1, "every arm counts the same tokens"
    for figures in results["methods"].values():
        assert figures["status"] == "ok", figures["error"]
        assert figures["identical"] + figures["near_tie_differences"] == 4 and figures["differences"] == 0
        assert figures["speedup"] > 0 and figures["speedup_low"] is figures["speedup_high"] is None, "of four prompts"
        assert set(figures["categories"]) == {"a", "b"}
    fork = results["methods"]["fork:2x2"]
    assert fork["tokens_per_pass"] >= 1 and 0 <= fork["acceptance_rate"] <= 1
    assert sum(int(length) * count for length, count in fork["block_lengths"].items()) == fork["tokens"]
    assert results["trees"]["fork:2x2"] == {"parents": [0, 0, 0, 1, 2]}
    sample = results["samples"][0]
    assert {"method", "category", "prompt", "tokens"} <= set(sample) and sample["tokens"][0]["source"]
    assert "fork:2x2" in (tmp_path / "out" / "report.html").read_text()
    assert "fork:2x2" in out and "speed-up" in out


def test_the_default_of_a_target_without_a_draft_is_its_int8_copy(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _, err = bench(invoke, tiny, prompt_file, out, "--draft", "none", "--methods", "ar auto", "--limit", "1")
    assert code == 0, err
    assert "its own weights in int8 draft" in err
    (figures,) = [
        figures for name, figures in json.loads((out / "results.json").read_text())["methods"].items() if name == "auto"
    ]
    assert figures["status"] == "ok" and figures["identical"] == 1


@pytest.mark.parametrize("temperature", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_texts_side_by_side_are_those_of_single_ones(
    invoke, tiny: str, prompt_file: str, tmp_path: Path, temperature: str
) -> None:
    methods, found = ("ar", "mcsd:2x1", "fork:2x2", "lookup", "hf"), []
    for batch in ("1", "3"):
        out = tmp_path / batch
        options = ("--methods", " ".join(methods), "--temperature", temperature, "--batch", batch)
        code, _, err = bench(invoke, tiny, prompt_file, out, *options)
        assert code == 0, err
        lines = (out / "runs.jsonl").read_text().splitlines()
        texts = {(one["method"], one["prompt"]): (one["token_ids"], one["passes"]) for one in map(json.loads, lines)}
        found.append((texts, json.loads((out / "results.json").read_text())["methods"]))
    (alone, figures), (together, counted) = found
    assert alone == together
    for name in methods:
        for key in ("acceptance_by_depth", "winning_branches"):
            assert counted[name][key] == figures[name][key], (name, key)
        for key in ("tokens_per_pass", "acceptance_rate", "accepted_share", "accepted_per_pass"):
            assert counted[name][key] == figures[name][key], (name, key)
            assert counted[name]["categories"]["a"][key] == figures[name]["categories"]["a"][key], (name, key)
    assert counted["mcsd:2x1"]["categories"]["a"]["acceptance_rate"] is not None, "texts of a batch are counted one by one"


def test_a_method_that_fails_in_a_batch_is_recorded_and_the_others_go_on(
    invoke, tiny: str, prompt_file: str, tmp_path: Path, registered: Callable[..., None]
) -> None:
    def broken(spec: MethodSpec, bench: Bench) -> Method:
        def generate_batch(prompts: list[list[int]], seed: int):
            raise RuntimeError("out of luck")

        return Method(name=spec.text, generate=lambda prompt, seed: iter(()), generate_batch=generate_batch)

    registered(METHODS, "broken", broken)
    code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "ar broken", "--batch", "2")
    assert code == 1 and "out of luck" in err
    methods = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert methods["broken"]["status"] == "failed" and methods["ar"]["prompts"] == 4


def test_an_interrupted_run_goes_on(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert bench(invoke, tiny, prompt_file, out, "--methods", "ar sd:2")[0] == 0
    lines = (out / "runs.jsonl").read_text().splitlines()
    (out / "runs.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    (out / "results.json").unlink()
    code, _, err = bench(invoke, tiny, prompt_file, out, "--methods", "ar sd:2")
    assert code == 2 and "--resume" in err
    assert bench(invoke, tiny, prompt_file, out, "--methods", "ar sd:2", "--resume")[0] == 0
    figures = json.loads((out / "results.json").read_text())["methods"]
    assert figures["ar"]["prompts"] == figures["sd:2"]["prompts"] == 4
    kept = (out / "runs.jsonl").read_text().splitlines()[:3]
    assert kept == lines[:3], "what was measured is not measured again"


def test_resuming_with_other_settings_is_refused(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bench(invoke, tiny, prompt_file, out, "--methods", "ar")
    code, _, err = bench(invoke, tiny, prompt_file, out, "--methods", "ar", "--resume", "--temperature", "1")
    assert code == 2 and "temperature=0.0" in err and err.count("\n") == 1


def test_a_failing_method_is_recorded_and_the_others_go_on(tiny: str, prompt_file: str, tmp_path: Path) -> None:
    session = BenchSession(BenchOptions(methods=("ar",), source=prompt_file, target=tiny, draft="none", max_new_tokens=6))

    def broken(prompt: list[int], seed: int):
        yield Token(1, "target", 0)
        raise RuntimeError("out of\nluck")

    session.methods.append(Method(name="broken", generate=broken))
    session.runner.methods.append(session.methods[-1])
    results = session.run(tmp_path / "out", resume=False, command=[], progress=lambda _: None)
    assert results["methods"]["broken"]["status"] == "failed"
    assert results["methods"]["broken"]["error"] == "RuntimeError: out of luck"
    assert results["methods"]["ar"]["prompts"] == 4


def test_a_registered_method_needs_nothing_else(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    def build(spec: MethodSpec, bench: Bench) -> Method:
        def generate(prompt: list[int], seed: int):
            yield from (Token(7, "oracle", 0) for _ in range(3))
            return None

        return Method(name=spec.text, generate=generate, comparable=False)

    with METHODS.holding("toy", build):
        code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "ar toy")
    assert code == 0, err
    figures = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]["toy"]
    assert figures["tokens_per_pass"] == 3 and figures["identical"] is None


def test_a_wrong_greedy_text_fails_the_run(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    def build(spec: MethodSpec, bench: Bench) -> Method:
        def generate(prompt: list[int], seed: int):
            yield from (Token(7, "oracle", 0) for _ in range(10))
            return None

        return Method(name=spec.text, generate=generate)

    with METHODS.holding("wrong", build):
        code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "ar wrong")
    assert code == 1 and "differ from ar's" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--methods", "ar mcds:2x1"], "did you mean 'mcsd'"),
        (["--methods", "mcsd:2x1,shceme=naive"], "has no option 'shceme'"),
        (["--methods", "mcsd:2x1,naive"], "is not an option with a value"),
        (["--methods", "mcsd:0x1"], "tree width 0"),
        (["--methods", " "], "no methods"),
        (["--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--methods", "mcsd:2x1,walk=nodde"], "unknown walk 'nodde'; did you mean 'node'?"),
        (["--methods", "mcsd:2x1,scheme=naiv"], "unknown scheme 'naiv'; did you mean 'naive'?"),
        (["--methods", "mcsd:2x1,draft_temperature=warm"], "draft_temperature='warm' is out of range"),
        (["--methods", "mcsd:2x1,draft_temperature=-1"], "draft_temperature=-1.0 is out of range"),
        (["--methods", "ar:3"], "takes no argument"),
        (["--methods", "hf-lookup:many"], "'many' is not a token count"),
        (["--methods", "hf-assisted:0"], "'0' is not a token count"),
        (["--threads", "0"], "--threads 0"),
        (["--max-new-tokens", "1000"], "does not fit after the longest prompt"),
        (["--repeat", "0"], "repeat=0"),
        (["--out", "/proc/nowhere"], "cannot write to /proc/nowhere"),
    ],
)
def test_bad_input_is_one_line(invoke, tiny: str, prompt_file: str, tmp_path: Path, options: list[str], expected: str) -> None:
    code, out, err = bench(invoke, tiny, prompt_file, tmp_path / "out", *options)
    assert code == 2 and out == "" and expected in err and err.count("\n") == 1


def test_an_output_folder_is_checked_before_models_are_loaded(invoke, prompt_file: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, err = bench(invoke, "/no/such/model", prompt_file, out, "--methods", "ar")
        assert code == 2 and f"cannot write to {out}" in err and err.count("\n") == 1
    (tmp_path / "runs.jsonl").write_text("")
    code, _, err = bench(invoke, "/no/such/model", prompt_file, tmp_path, "--methods", "ar")
    assert code == 2 and "already holds a benchmark" in err


def test_an_interruption_keeps_what_was_measured(
    invoke, tiny: str, prompt_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, count = Runner._measure, iter(range(100))

    def interrupted(*arguments) -> Measurement:
        if next(count) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(Runner, "_measure", interrupted)
    code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "ar sd:2")
    assert code == 130 and f"add --resume to continue in {tmp_path / 'out'}" in err
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 3
    assert bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "ar sd:2", "--resume")[0] == 0


def test_a_failed_method_is_named_with_its_reason(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    def build(spec: MethodSpec, bench: Bench) -> Method:
        def generate(prompt: list[int], seed: int):
            yield Token(1, "target", 0)
            raise KeyError("lost")  # of a kind that no engine of ours raises

        return Method(name=spec.text, generate=generate)

    with METHODS.holding("lossy", build):
        code, out, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "lossy ar")
    assert code == 1 and "methods failed: lossy (KeyError: 'lost')" in err and "ar" in out
    figures = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert figures["lossy"]["status"] == "failed" and figures["ar"]["prompts"] == 4


def measurement(method: str, prompt: str, repeat: int, seconds: float, tokens: int = 10) -> Measurement:
    return Measurement(
        method=method, prompt=prompt, category="a", repeat=repeat, seconds=seconds, first_token_seconds=None,
        token_ids=[1] * tokens, sources=["target"] * tokens, passes=list(range(tokens)), stats=None, peak_bytes=1,
    )  # fmt: skip


def test_speed_up_is_over_all_prompts_with_medians_of_repeats() -> None:
    times = {"ar": [2.0, 4.0, 2.0, 2.0, 4.0, 4.0], "x": [1.0, 2.0, 1.0, 1.0, 2.0, 2.0]}
    runs = [
        measurement(method, f"p{prompt}", repeat, seconds if repeat else 50.0)
        for method, per_prompt in times.items()
        for prompt, seconds in enumerate(per_prompt)
        for repeat in range(3)
    ]
    figures = summarise(runs, ["ar", "x"], None)
    assert figures["x"]["speedup"] == pytest.approx(2) and figures["x"]["tokens_per_second"] == pytest.approx(20 / 3)
    assert figures["x"]["speedup_low"] == pytest.approx(2) and figures["x"]["identical"] is None


def test_every_figure_has_an_interval_over_prompts() -> None:
    def counted(number: int) -> Measurement:
        accepts, offers = [8 + number % 2, 4], [10, 8]
        stats = {
            "rounds": 10, "accepts": accepts, "offers": offers, "accepted_tokens": sum(accepts), "path_tokens": 20,
            "wins": [6 + number % 2, 2], "win_tokens": [9, 3], "seconds": dict.fromkeys((*PHASES, "total"), 0.0),
        }  # fmt: skip
        one = measurement("x", f"p{number}", 0, 1.0 + number % 2)
        return replace(one, passes=[place // 2 for place in range(10)], stats=stats, log_likelihood=-3.0)

    blocks = [EnergyBlock(method="x", block=block, tokens=10, seconds=1.0, joules=5.0 + block / 2) for block in range(3)]
    figures = summarise(map(counted, range(8)), ["x"], None, blocks)["x"]
    assert figures["log_likelihood_by_prompt"] == pytest.approx([-0.3] * 8)
    for name, value in (
        ("tokens_per_second", 20 / 3), ("tokens_per_pass", 2), ("acceptance_rate", 12.5 / 18), ("accepted_per_pass", 1.25),
        ("accepted_share", 12.5 / 20), ("joules_per_token", 0.55), ("log_likelihood_per_token", -0.3),
    ):  # fmt: skip
        assert figures[name] == pytest.approx(value)
        assert figures[f"{name}_low"] - 1e-9 <= value <= figures[f"{name}_high"] + 1e-9
    assert figures["acceptance_rate_low"] < 12.5 / 18 < figures["acceptance_rate_high"]
    assert figures["acceptance_by_depth"] == pytest.approx([0.85, 0.5])
    assert figures["acceptance_by_depth_low"][0] < 0.85 < figures["acceptance_by_depth_high"][0]
    first, second = figures["winning_branches"]
    assert first["share"] + second["share"] == pytest.approx(1) and second["accepted"] == pytest.approx(1.5)
    assert first["share_low"] < first["share"] < first["share_high"]
    few = summarise(map(counted, range(5)), ["x"], None)["x"]
    assert few["tokens_per_pass"] == 2 and few["tokens_per_pass_low"] is None and few["acceptance_by_depth_low"] == [None, None]


def test_improved_mcsd_runs_whole_with_both_decision_models(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    target = load_model(tiny, torch.device("cpu"), torch.float32)
    draft = load_draft("early-exit:2", target)
    features, folders = target.model.hf_model.config.hidden_size, {}
    for kind, inputs in ((DecisionKind.HIDDEN, features), (DecisionKind.DISTRIBUTION, 4)):
        folders[kind] = tmp_path / kind
        folders[kind].mkdir()
        decision = DecisionModel(DecisionShape(kind=kind, inputs=inputs, width=4))
        torch.nn.init.constant_(decision.mlp[-1].bias, -50.0)  # stops wherever it is asked
        save_decision(decision, draft, folders[kind], {})
    names = ["target-init:3x3", *(f"target-init:3x3,decision={folder}" for folder in folders.values())]
    code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", f"ar {' '.join(names)}", "--batch", "4")
    assert code == 0, err
    methods = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    without, *stopped = (methods[name] for name in names)
    assert without["accepted_per_pass"] <= 3 and all(one["accepted_per_pass"] <= 1 for one in stopped), "of one drafted level"
    assert without["accepted_per_pass"] > max(one["accepted_per_pass"] for one in stopped)
    code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "no", "--methods", "ar target-init:3x3,scheme=greedy")
    assert code == 2 and "has no option 'scheme'; allowed: decision, stop_below" in err


def test_a_method_can_be_measured_again_as_another_arm(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--methods", "ar ar,graphs=no sd:2 ar,arm=2 sd:2,arm=2")
    assert code == 0, err
    methods = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert list(methods) == ["ar", "ar,graphs=no", "sd:2", "ar,arm=2", "sd:2,arm=2"]
    assert methods["ar,arm=2"]["identical"] == 4 and methods["ar,arm=2"]["speedup"] > 0


@pytest.mark.parametrize(("prompts", "marked"), [(1, False), (5, False), (6, True)])
def test_few_prompts_show_no_verdict(prompts: int, marked: bool) -> None:
    times = {"ar": 2.0, "x": 1.0}
    runs = [measurement(method, f"p{number}", 0, seconds) for method, seconds in times.items() for number in range(prompts)]
    figures = summarise(runs, ["ar", "x"], None)["x"]
    assert figures["speedup"] == pytest.approx(2) and (figures["speedup_low"] is not None) is marked
    for one in (figures, figures["categories"]["a"]):
        assert ("▲" in speedup(one)) is marked and speedup_verdict(one) == ("faster" if marked else "unknown")


def test_a_journal_survives_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"target": "x"}, resume=False)
    journal.add(measurement("ar", "p", 0, 1.0))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"method": "ar", "prom')
    resumed = Journal(tmp_path, {"target": "x"}, resume=True)
    resumed.add(measurement("ar", "q", 0, 1.0))
    assert [one.prompt for one in resumed] == ["p", "q"]
    written = (tmp_path / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(written.replace('"q"', '"q\u2028"'))
    assert [one.prompt for one in resumed] == ["p", "q\u2028"], "a line ends at a line feed only"
    with pytest.raises(UsageError, match="--resume"):
        Journal(tmp_path, {"target": "x"}, resume=False)


def test_a_full_disk_leaves_the_settings_of_a_journal(tmp_path, monkeypatch):
    Journal(tmp_path, {"target": "x"}, resume=False)

    def full(path, text):
        path.write_bytes(text[:1].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UsageError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        Journal(tmp_path, {"target": "x"}, resume=True)
    Journal(tmp_path, {"target": "x"}, resume=True)


@pytest.mark.slow
def test_a_paper_is_measured_again(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    code, out, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--reproduce", "mcsd", "--limit", "2")
    assert code == 0, err
    text = (tmp_path / "out" / "reproduction.md").read_text()
    for words in ("Table 4", "Figure 4", "Table 2: block efficiency", "**Ours**", "**Published**", "8x2x1x1", "monotonic"):
        assert words in text
    assert text in out
    for name, words in (("figure-3.svg", "acceptance rate"), ("figure-4.svg", "K = 32")):
        assert f"]({name})" in text and words in (tmp_path / "out" / name).read_text()


def test_a_folder_of_prompt_sets_gives_each_run_its_own(
    invoke, tiny: str, tmp_path: Path, registered: Callable[..., None]
) -> None:
    sets = tmp_path / "sets"
    sets.mkdir()
    for name in ("one", "other"):
        (sets / f"{name}.jsonl").write_text(json.dumps({"id": name, "category": "a", "prompt": name}) + "\n")
    runs = tuple(
        Run(name=name, prompts=name, temperature=0.0, methods=("ar",), timed=name == "other") for name in ("one", "other")
    )
    for name in ("small", "tiny"):
        registered(PAPERS, name, Paper(title=name, runs=runs, tables=()))
    options = ("bench", "--target", tiny, "--draft", "early-exit:2", "--prompts", str(sets), "--out", str(tmp_path / "out"))
    code, _, err = invoke(*options, "--reproduce", "small,tiny", "--runs", "counted")
    assert code == 0, err
    assert not (tmp_path / "out" / "small" / "other").exists(), "timed runs are left out"
    code, _, err = invoke(*options, "--reproduce", "small,tiny", "--resume")
    assert code == 0, err
    for paper in ("small", "tiny"):
        kept = json.loads((tmp_path / "out" / paper / f"{paper}.json").read_text())
        assert {run: found["settings"]["source"] for run, found in kept.items()} == {"one": "one", "other": "other"}
        assert "speedup" in kept["other"]["methods"]["ar"] and "speedup" not in kept["one"]["methods"]["ar"]
    code, _, err = invoke(*options, "--reproduce", "small", "--runs", "conted")
    assert code == 2 and "did you mean 'counted'" in err
    code, _, err = invoke(*options, "--reproduce", "small", "--methods", "ar sd:5")
    assert code == 2 and "unknown method 'sd:5'" in err
    (sets / "other.jsonl").unlink()
    code, _, err = invoke(*options, "--reproduce", "small")
    assert code == 2 and err.count("\n") == 1 and "holds no other.jsonl" in err


def test_an_unknown_paper_is_refused(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    code, _, err = bench(invoke, tiny, prompt_file, tmp_path / "out", "--reproduce", "mcds")
    assert code == 2 and "did you mean 'mcsd'" in err


def test_an_inflated_target_is_measured_and_labelled(
    invoke, tiny: str, prompt_file: str, tmp_path: Path, registered: Callable[..., None]
) -> None:
    shape = BigShape(hidden_size=48, num_layers=4, num_heads=4, num_key_heads=4, head_size=16, mlp_size=64)
    registered(SHAPES, "test", shape)
    target = f"inflated:test:{tiny}"
    code, out, err = bench(invoke, target, prompt_file, tmp_path / "out", "--methods", "ar mcsd:2x1 hf", "--limit", "2")
    assert code == 0, err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"]["target"] == target and "acceptance are the small model's" in results["settings"]["inflated"]
    assert "inflated: the weights of" in out and "inflated: the weights of" in (tmp_path / "out" / "report.html").read_text()
