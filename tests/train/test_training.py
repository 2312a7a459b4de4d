"""Training from nothing but a target, and what becomes of it when something goes wrong."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import polydraft
from covering import keeping
from polydraft.errors import FailureError, UsageError
from polydraft.models.loading import Loaded, load_model
from polydraft.sampling import SamplingParams
from polydraft.train import HeadSize, TrainSettings, training
from polydraft.train.forecast import needs_of, tokens_per_pass
from polydraft.train.pupils import Acceptance
from polydraft.train.training import Report, train
from polydraft.train.writer import Writer

from .conftest import short, weights

GREEDY = SamplingParams(temperature=0)
# Both kinds are trained, loaded and decoded with by default; the loop around them is the same.
only_head, only_draft = (
    pytest.mark.parametrize("kind", keeping(["head", "draft"], kept), indirect=True) for kept in ("head", "draft")
)


class KilledError(Exception):
    pass


def run(settings: TrainSettings, target: Loaded, out: Path, resume: bool = False, kill_at: int | None = None) -> list[Report]:
    reports: list[Report] = []

    def observer(report: Report) -> None:
        reports.append(report)
        if kill_at is not None and report.phase == "training" and report.done >= kill_at:
            raise KilledError

    train(settings, target, out, resume=resume, command="polydraft train", observer=observer)
    return reports


def test_a_trained_draft_is_loaded_by_name_and_leaves_the_text_alone(
    kind: str, target: Loaded, tiny: str, tmp_path: Path
) -> None:
    reports = run(short(kind, vocabulary=100), target, tmp_path / "out")
    assert {report.phase for report in reports} == {"sampling", "training"}
    assert reports[-1].done == reports[-1].total == 12
    assert all(0 <= level.sampled_1 <= level.sampled_4 + 0.05 <= 1.05 for level in reports[-1].acceptance)
    plain = polydraft.load(tiny, draft="none", device="cpu", dtype="float32")
    decoder = polydraft.load(tiny, draft=str(tmp_path / "out"), tree="3x2", device="cpu", dtype="float32")
    prompts = ["hello", "a longer prompt with more words", "x"]
    expected = [result.token_ids for result in plain.generate(prompts, max_new_tokens=20, sampling=GREEDY)]
    results = decoder.generate(prompts, max_new_tokens=20, sampling=GREEDY)
    assert [result.token_ids for result in results] == expected
    card = (tmp_path / "out" / "README.md").read_text()
    assert "polydraft train" in card
    assert "100 frequent tokens" in card
    assert "conversations" in card


def test_a_distilled_draft_is_an_ordinary_model(target: Loaded, tmp_path: Path) -> None:
    run(short("draft", vocabulary=64), target, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    logits_BTV = model(torch.tensor([[1, 2, 3]])).logits
    assert logits_BTV.shape[-1] == target.model.vocab_size
    assert logits_BTV.isfinite().all()


@only_head
def test_training_teaches(kind: str, target: Loaded, tmp_path: Path) -> None:
    steps = {"head": 80, "draft": 160}[kind]  # a whole model learns more slowly
    few = short(kind, steps=steps, tokens=2000, batch_size=8, evaluate_every=steps, save_every=steps)
    reports = run(few, target, tmp_path / "out")
    training = [report for report in reports if report.phase == "training"]
    assert training[-1].acceptance[0].sampled_1 > training[0].acceptance[0].sampled_1 + 0.04


@pytest.mark.slow
@only_draft
def test_same_seed_same_draft_and_another_seed_another(kind: str, target: Loaded, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 1), ("other", 2)):
        run(short(kind, seed=seed), target, tmp_path / name)
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert weights(tmp_path / "one") != weights(tmp_path / "other")


@only_head
def test_a_killed_training_goes_on_from_its_checkpoint_to_the_same_draft(kind: str, target: Loaded, tmp_path: Path) -> None:
    settings = short(kind, evaluate_every=3)
    run(settings, target, tmp_path / "whole")
    with pytest.raises(KilledError):
        run(settings, target, tmp_path / "killed", kill_at=9)
    reports = run(settings, target, tmp_path / "killed", resume=True)
    training = [report for report in reports if report.phase == "training"]
    assert training[0].done == 8, "a kill may cost one checkpoint interval, no more"
    assert not [report for report in reports if report.phase == "sampling"], "the texts are kept"
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")


def test_a_full_disk_leaves_the_old_checkpoint(monkeypatch: pytest.MonkeyPatch, target: Loaded, tmp_path: Path) -> None:
    settings = short("head")
    with pytest.raises(KilledError):
        run(settings, target, tmp_path / "out", kill_at=6)
    save_file = training.save_file

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "save_file", full)
    with pytest.raises(FailureError, match=r"No space left.*last checkpoint is intact"):
        run(settings, target, tmp_path / "out", resume=True)
    monkeypatch.setattr(training, "save_file", save_file)
    assert not list((tmp_path / "out" / "training").glob(".checkpoint*"))
    reports = run(settings, target, tmp_path / "out", resume=True)
    assert next(report for report in reports if report.phase == "training").done == 4


@only_draft
def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good(
    monkeypatch: pytest.MonkeyPatch, kind: str, target: Loaded, tmp_path: Path
) -> None:
    original, calls = training.loss_of, []

    def failing(*arguments):
        calls.append(None)
        loss, accepted_R = original(*arguments)
        return loss * (float("nan") if len(calls) > 7 * (2 if kind == "head" else 1) else 1.0), accepted_R

    monkeypatch.setattr(training, "loss_of", failing)
    with pytest.raises(FailureError, match=r"not a number at step \d+.*last good checkpoint"):
        run(short(kind), target, tmp_path / "out")
    with safe_open(tmp_path / "out" / "training" / "checkpoint.safetensors", "pt") as checkpoint:
        assert checkpoint.metadata() == {"step": "4"}


@pytest.mark.parametrize(("part", "option"), [("loss_of", "--batch-size"), ("write", "--sampling-rows")])
def test_too_little_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, part: str, option: str, target: Loaded, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.99 GiB.")

    monkeypatch.setattr(*((training, part, full) if part == "loss_of" else (Writer, part, full)))
    settings = short("head")
    with pytest.raises(FailureError, match=f"too little GPU memory.*use a smaller {option}") as caught:
        run(settings, target, tmp_path / "out")
    with pytest.raises(FailureError, match=str(caught.value)[:30]):
        needs_of(settings, target)


def test_a_folder_in_use_is_not_touched(target: Loaded, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        run(short("head"), target, tmp_path)
    run(short("head"), target, tmp_path / "out")
    with pytest.raises(UsageError, match="started with seed=0, not 3"):
        run(short("head", seed=3), target, tmp_path / "out", resume=True)


def test_more_steps_may_be_added(target: Loaded, tmp_path: Path) -> None:
    run(short("head"), target, tmp_path / "out")
    reports = run(short("head", steps=14), target, tmp_path / "out", resume=True)
    assert next(report.done for report in reports if report.phase == "training") == 12


@pytest.mark.parametrize("loss", keeping(["kl", "tv", "kl+tv"], "tv"))
def test_other_losses(loss: str, target: Loaded, tmp_path: Path) -> None:
    reports = run(short("head", loss=loss), target, tmp_path / "out")
    assert reports[-1].loss is not None
    if loss == "tv":
        assert 0 <= reports[-1].loss <= 1


def test_a_head_for_another_tokenizer_is_refused(target: Loaded, tiny: str, other_vocabulary: str, tmp_path: Path) -> None:
    run(short("head"), target, tmp_path / "out")
    with pytest.raises(UsageError, match="another tokenizer"):
        polydraft.load(other_vocabulary, draft=str(tmp_path / "out"), tree="2", device="cpu")
    shutil.copyfile(Path(tiny) / "config.json", tmp_path / "config.json")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(FailureError, match="cannot read the weights"):
        polydraft.load(tiny, draft=str(tmp_path / "out"), tree="2", device="cpu")


@pytest.mark.slow
def test_a_head_begins_where_another_ended(target: Loaded, other_vocabulary: str, tmp_path: Path) -> None:
    first = short("head", steps=40, evaluate_every=40)
    ended = run(first, target, tmp_path / "one")[-1].acceptance
    assert isinstance(first.size, HeadSize)
    wider = replace(first, steps=1, size=replace(first.size, taps=(1, 2)), start=str(tmp_path / "one"))
    reports = run(wider, target, tmp_path / "two")
    begun = next(report for report in reports if report.phase == "training").acceptance
    # The new tap has no say yet; weights on disk are in bfloat16.
    assert begun[0].sampled_1 == pytest.approx(ended[0].sampled_1, abs=0.01)
    assert begun[1].sampled_1 == pytest.approx(ended[1].sampled_1, abs=0.01)
    other = load_model(other_vocabulary, torch.device("cpu"), torch.float32)
    with pytest.raises(UsageError, match="was trained for another tokenizer"):
        run(wider, other, tmp_path / "three")
    with pytest.raises(UsageError, match=r"has another shape \(.* differs\)"):
        run(replace(wider, size=replace(wider.size, mlp_size=16)), target, tmp_path / "four")
    (tmp_path / "one" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(FailureError, match="cannot read the weights"):
        run(wider, target, tmp_path / "five")


def test_a_target_without_template_writes_plain_text(target: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target.tokenizer.chat_template = None
    with caplog.at_level("INFO"):
        run(short("head"), target, tmp_path / "out")
    assert "no chat template" in caplog.text
    assert "plain text" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_prompts_and_text_files_as_sources(target: Loaded, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hi\nwhat now?\n")
    (tmp_path / "text.txt").write_text("some plain text, again and again. " * 60)
    run(short("draft", prompts=str(tmp_path / "prompts.txt"), length=80), target, tmp_path / "one")
    assert "answers of the target" in (tmp_path / "one" / "README.md").read_text()
    run(short("draft", texts=(str(tmp_path / "text.txt"),)), target, tmp_path / "two")
    assert "text files" in (tmp_path / "two" / "README.md").read_text()
    with pytest.raises(UsageError, match="at least 200 are needed"):
        run(short("draft", texts=(str(tmp_path / "prompts.txt"),), length=100), target, tmp_path / "three")


def test_a_model_that_hides_its_states_gets_no_head() -> None:
    from families import FAMILIES
    from polydraft.models.hf import HFModel

    with pytest.raises(UsageError, match="does not show its hidden states"):
        HFModel(FAMILIES.get("gemma2").build()).tap((1,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0 is out of range"),
        (("--loss", "mse"), "unknown loss 'mse'"),
        (("--tree", "4x0"), "--tree '4x0' is not a list of candidates per depth"),
        (("--start", "."), "is not a folder with a head"),
        (("--made-up", "1.5"), "--made-up 1.5 is out of range"),
        (("--length", "4"), "--length 4 is out of range"),
        (("--length", "4000"), "longer than the target's context"),
        (("--text", "nowhere.txt"), "there is no such file"),
        (("--taps", "a,b"), "not a list of whole numbers"),
        (("--taps", "1,99"), "allowed: layers 1 to"),
        (("--text", "pyproject.toml", "--prompts", "pyproject.toml"), "--prompts and --text cannot be combined"),
    ],
)
def test_bad_options_in_one_line(invoke, tiny: str, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    options = ["--tokens", "400", "--batch-size", "2", "--device", "cpu"]
    length = [] if "--length" in arguments else ["--length", "40"]
    code, out, err = invoke("train", "head", "--target", tiny, "--out", str(tmp_path / "out"), *options, *length, *arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_text_that_is_not_utf_8_is_refused_before_a_model_is_loaded(invoke, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    code, out, err = invoke(
        "train", "draft", "--target", "no/model", "--out", str(tmp_path / "out"), "--text", str(tmp_path / "latin.txt")
    )
    assert (code, out) == (2, "") and "as UTF-8 text" in err and err.count("\n") == 1


def test_the_command_reports_and_tells_how_to_go_on(invoke, tiny: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    sizes = ["--tokens", "800", "--length", "40", "--steps", "6", "--batch-size", "4", "--device", "cpu", "--taps", "none"]
    code, out, err = invoke("train", "head", "--target", tiny, "--out", folder, *sizes)
    assert code == 0, err
    assert f"--draft {folder}" in out
    assert re.search(r"expected on this machine.*tree 4x2x2x1x1: [\d.]+× plain decoding at T=0 \([\d.]+ tokens per pass\)", out)
    assert re.search(r"this will take about .* to write the text, .* to train\), and [\d.]+ GB of disk", err)
    assert "loss" in err
    assert "held out" in err
    assert load_model(tiny, torch.device("cpu"), torch.float32).model.taps == ()


def test_tokens_per_pass_follow_from_acceptance() -> None:
    level = Acceptance(greedy_1=0.5, greedy_4=0.75, sampled_1=0.4, sampled_4=0.8)
    assert tokens_per_pass([level], "1x1", greedy=True) == pytest.approx(1 + 0.5 + 0.25)
    assert tokens_per_pass([level, level], "4x2x1", greedy=False) == pytest.approx(1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.4)


def test_prompts_of_any_length_find_a_text_that_holds_them(target: Loaded, tmp_path: Path) -> None:
    rows = ["short", "x" * 40, "y" * 2000]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{row}"}}\n' for row in rows))
    run(short("head", prompts=str(file), length=40, made_up=0.5), target, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "answers of the target to the prompts" in card
    assert "conversations" in card
    assert "texts of 40 and 80" in card
    file.write_text('{"prompt": "fine"}\n{"question": 3}\n')
    with pytest.raises(UsageError, match="line 2"):
        run(short("head", prompts=str(file)), target, tmp_path / "bad")
