"""Fine-tuning: a draft that is there already, a model or a head, instead of a new one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import polydraft
from conftest import byte_tokenizer, save
from covering import keeping
from families import FAMILIES
from models.eagle3_cases import TAPS, config_of, weights_of, write
from polydraft.errors import FailureError, UsageError
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.loading import Loaded, load_draft, load_model
from polydraft.sampling import SamplingParams
from polydraft.train import DraftSize, HeadSize
from polydraft.train.corpus import Corpus
from polydraft.train.pupils import Teacher, acceptance_of
from polydraft.train.start import load_start
from polydraft.train.training import make_pupil
from polydraft.train.writer import Texts

from .conftest import short
from .test_training import KilledError, run, weights

NEW = DraftSize()
LONGER = {"steps": 16, "tokens": 1600, "batch_size": 8, "evaluate_every": 16, "save_every": 16, "learning_rate": 1e-2}
"""Enough to see that it learns."""
CPU = torch.device("cpu")


def save_family(folder: Path, family: str, **options: object) -> str:
    """Save a small model of another family with the tiny target's tokenizer."""
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "eos_token_id": tokenizer.eos_token_id}
    FAMILIES.get(family).build(seed=7, **{**sizes, **options}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def texts() -> Texts:
    tokens_NL = torch.randint(0, 200, (20, 24), generator=torch.Generator().manual_seed(0))
    return Texts(tokens_NL, torch.ones_like(tokens_NL, dtype=torch.bool))


# The last hidden states of gemma2 are not enough for its logits, which are capped.
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.parametrize("vocabulary", [0, 100])
def test_a_draft_starts_as_the_model_that_is_given(
    family: str, vocabulary: int, target: Loaded, texts: Texts, tmp_path: Path
) -> None:
    settings = short("draft", size=NEW, start=save_family(tmp_path, family), vocabulary=vocabulary)
    pupil = make_pupil(settings, target, Corpus((texts,), "chance"), load_start(settings, target))
    lesson = pupil.study(texts, 1)
    distributions, [(rows_R, outputs_RH)] = lesson.distributions, lesson.outputs
    logits_RD = pupil.logits(outputs_RH)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected_RV = model(texts.tokens_NL).logits[:, :-1].flatten(0, 1)
    known = pupil.teacher.vocabulary
    assert (known is None) == (vocabulary == 0)
    expected_RD = expected_RV if known is None else expected_RV[:, known.tokens_D]
    torch.testing.assert_close(logits_RD, expected_RD, rtol=1e-4, atol=1e-5)
    teacher = Teacher(target.model, known)
    own = teacher.distributions(teacher.features(texts.tokens_NL)[:, :-1].flatten(0, 1))
    begun, given = acceptance_of(distributions.rows(rows_R), logits_RD), acceptance_of(own, expected_RD)
    assert (begun.greedy_1, begun.greedy_4) == (given.greedy_1, given.greedy_4)
    assert (begun.sampled_1, begun.sampled_4) == pytest.approx((given.sampled_1, given.sampled_4), abs=1e-4)


@pytest.mark.parametrize("family", keeping(["mistral", "gpt2", "gemma2"], "mistral"))
def test_a_fine_tuned_draft_is_better_and_of_the_same_architecture(
    family: str, target: Loaded, tiny: str, tmp_path: Path
) -> None:
    start = save_family(tmp_path / "start", family)
    settings = short("draft", size=NEW, start=start, **LONGER, vocabulary=0)
    before = weights(tmp_path / "start")
    reports = [report for report in run(settings, target, tmp_path / "out") if report.phase == "training"]
    assert reports[-1].acceptance[0].sampled_1 > reports[0].acceptance[0].sampled_1 + 0.02
    theirs, ours = AutoConfig.from_pretrained(start).to_dict(), AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    free = {"dtype", "transformers_version", "_name_or_path", "acceptance", "steps", "trained_for"}
    assert {key: value for key, value in ours.items() if key not in free} == {
        key: value for key, value in theirs.items() if key not in free
    }
    assert f"Start: `{start}`" in (tmp_path / "out" / "README.md").read_text()
    assert weights(tmp_path / "start") == before, "what is given is not written to"
    drafted = polydraft.load(tiny, draft=str(tmp_path / "out"), tree="2x2", device="cpu", dtype="float32")
    plain = polydraft.load(tiny, draft="none", device="cpu", dtype="float32")
    greedy = SamplingParams(temperature=0)
    texts = [decoder.generate("hello", max_new_tokens=12, sampling=greedy).token_ids for decoder in (drafted, plain)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_fine_tuning_goes_on_from_its_checkpoint_to_the_same_draft(target: Loaded, tmp_path: Path) -> None:
    settings = short("draft", size=NEW, start=save(tmp_path / "start", seed=3), evaluate_every=100)
    run(settings, target, tmp_path / "whole")
    with pytest.raises(KilledError):
        run(settings, target, tmp_path / "killed", kill_at=9)
    with pytest.raises(UsageError, match="started with start="):
        run(replace(settings, start=None), target, tmp_path / "killed", resume=True)
    reports = run(settings, target, tmp_path / "killed", resume=True)
    assert next(report.done for report in reports if report.phase == "training") == 8
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")


def test_tables_may_be_padded_differently(target: Loaded, tmp_path: Path) -> None:
    size = target.model.vocab_size
    for rows in (size + 7, size - 1):  # the last token is never a draft's where it has no row
        start = save_family(tmp_path / str(rows), "mistral", vocab_size=rows, eos_token_id=0)
        run(short("draft", size=NEW, start=start, steps=2, vocabulary=0), target, tmp_path / f"out{rows}")
        draft = load_draft(str(tmp_path / f"out{rows}"), target)
        assert draft is not None and draft.vocabulary is not None
        assert len(draft.vocabulary.tokens_D) == min(size, rows)


def test_a_head_in_eagle_3_s_form_is_trained_further(target: Loaded, tmp_path: Path) -> None:
    config = config_of(vocab_size=target.model.vocab_size, draft_vocab_size=100, norm_before_residual=True, **{TAPS: [1]})
    start = write(tmp_path / "start", config, weights_of(config))
    settings = short("head", size=HeadSize(rollouts=2), start=str(start), **LONGER)
    reports = [report for report in run(settings, target, tmp_path / "out") if report.phase == "training"]
    assert reports[-1].acceptance[0].sampled_1 > reports[0].acceptance[0].sampled_1 + 0.02
    assert kind_of(tmp_path / "out") is HEAD_KINDS.get("eagle3")
    before, after = (load_draft(str(folder), target) for folder in (start, tmp_path / "out"))
    assert before is not None and after is not None
    assert after.shape == before.shape and after.num_columns == before.num_columns
    assert json.loads((tmp_path / "out" / "config.json").read_text())["trained_for"] == "tiny"
    with pytest.raises(UsageError, match="--mlp does not go with --start"):
        replace(settings, size=HeadSize(rollouts=2, mlp_size=8))


@pytest.mark.parametrize(
    ("kind", "start", "more", "message"),
    [
        ("draft", "HEAD", (), "is a feature head, which polydraft train head continues"),
        ("head", "MODEL", (), "is not a folder with a head; allowed: a head of polydraft train head, an EAGLE-3 head"),
        ("draft", "MODEL", ("--layers", "2"), "--layers does not go with --start"),
        ("draft", "MODEL", ("--width", "64"), "--width does not go with --start"),
        ("draft", "./nowhere", (), "cannot load --start './nowhere': there is no such folder"),
        ("draft", "no/where", (), "cannot load --start 'no/where': no such folder, and not found on a hub"),
        ("draft", "early-exit:1", (), "cannot load --start 'early-exit:1'"),
        ("head", "./nowhere", (), "is not a folder with a head"),
        ("draft", "OTHER", (), "have different vocabularies"),
        (
            "draft",
            "SHORT",
            (),
            "up to 32 tokens, but training texts have 40; use a smaller --length, such as 32",
        ),
    ],
)
def test_a_wrong_start_in_one_line(
    invoke, kind: str, start: str, more: tuple[str, ...], message: str, tiny: str, other_vocabulary: str, tmp_path: Path
) -> None:
    if start == "HEAD":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "polydraft_feature_head"}))
    folders = {"HEAD": str(tmp_path), "MODEL": tiny, "OTHER": other_vocabulary}
    name = save_family(tmp_path, "gpt2", max_position_embeddings=32) if start == "SHORT" else folders.get(start, start)
    options = ["--tokens", "400", "--batch-size", "2", "--length", "40", "--device", "cpu", "--out", str(tmp_path / "out")]
    code, out, err = invoke("train", kind, "--target", tiny, "--start", name, *options, *more)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_torn_start_is_refused_before_texts_are_written(target: Loaded, tmp_path: Path) -> None:
    start = Path(save(tmp_path / "start", seed=1))
    (start / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(FailureError, match="cannot read the weights"):
        run(short("draft", size=NEW, start=str(start)), target, tmp_path / "out")


def test_the_command_says_what_fine_tuning_gained(invoke, tiny: str, tmp_path: Path) -> None:
    start = save(tmp_path / "start", seed=2)
    sizes = ["--tokens", "800", "--length", "40", "--steps", "6", "--batch-size", "4", "--device", "cpu"]
    code, out, err = invoke("train", "draft", "--target", tiny, "--start", start, "--out", str(tmp_path / "out"), *sizes)
    assert code == 0, err
    assert "this will take about" in err
    assert "held out, before and after: α@1" in out
    assert load_model(str(tmp_path / "out"), CPU, torch.float32).model.config.model_type == "llama"
