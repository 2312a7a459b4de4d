"""What draft="auto" means for a model of one's own."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import polydraft
from polydraft import automatic, devices
from polydraft.automatic import automatic_draft
from polydraft.defaults import default_draft
from polydraft.errors import UsageError
from polydraft.loading import load_with
from polydraft.models.heads.known import remember_draft
from polydraft.models.int8_copy import Int8Copy
from polydraft.models.loading import load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.options import LoadOptions
from polydraft.profile import Pick, Profile, origin_of
from polydraft.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
SHIPPED = Path(polydraft.__file__).parent / "drafts" / "smollm2-head"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="polydraft")
    return caplog


def test_a_model_without_a_draft_has_its_own_copy(roomy: str, said: pytest.LogCaptureFixture) -> None:
    ours, plain = polydraft.load(roomy, dtype="float32"), polydraft.load(roomy, "none", dtype="float32")
    assert isinstance(ours.drafter.model, Int8Copy)
    assert "its own weights in int8 draft" in said.text and "polydraft train head --target" in said.text
    assert len([one for one in said.records if "no draft" in one.message]) == 1  # nothing is said where none was asked for
    texts = [decoder.generate("Good morning", sampling=GREEDY, max_new_tokens=40).token_ids for decoder in (ours, plain)]
    assert texts[0] == texts[1]


def test_so_does_one_that_is_loaded_already(roomy: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(roomy).eval()
    assert isinstance(polydraft.load(model).drafter.model, Int8Copy)


def test_a_target_in_int8_has_ngrams(roomy: str, said: pytest.LogCaptureFixture) -> None:
    ours = polydraft.load(roomy, dtype="int8")
    assert ours.drafter.name == "suffix" and "in int8 already, so n-grams of the text draft where they pay" in said.text
    assert ours.generate("abcabcabc", sampling=GREEDY, max_new_tokens=8).token_ids


def test_whatever_is_asked_for_is_done(roomy: str) -> None:
    assert polydraft.load(roomy, "none", dtype="float32").drafter.name == "none"
    assert polydraft.load(roomy, dtype="float32", drafter="lookup").drafter.name == "lookup"
    assert polydraft.load(roomy, dtype="float32", tree="none").drafter.name == "none"


def test_no_copy_where_memory_is_short(roomy: str, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "free_bytes", lambda device: 1000)
    place = resolve_device("cpu")
    loaded = load_model(roomy, place, resolve_dtype("float32", place))
    options, draft = automatic_draft(LoadOptions(roomy), loaded)
    assert draft is None and options.drafter == "suffix"
    assert "GB of memory that are free" in said.text


def test_a_head_beside_the_target_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    target, file = tmp_path / "mine", tmp_path / "other.gguf"
    target.mkdir()
    file.touch()
    assert default_draft(str(target)) == default_draft(str(file)) == "none"
    for folder in ("mine-head", "other-head"):
        shutil.copytree(SHIPPED, tmp_path / folder)
    assert default_draft(str(target)) == str(tmp_path / "mine-head")
    assert default_draft(str(file)) == str(tmp_path / "other-head")
    shutil.move(tmp_path / "mine-head", target / "head")
    assert default_draft(str(target)) == str(target / "head")


def test_a_head_that_does_not_fit_is_passed_over_with_a_line(
    roomy: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    target = shutil.copytree(roomy, tmp_path / "mine")
    shutil.copytree(SHIPPED, target / "head")
    (target / "other").mkdir()
    (target / "other" / "config.json").write_text('{"speculators_model_type": "of tomorrow"}')
    assert isinstance(polydraft.load(str(target), dtype="float32").drafter.model, Int8Copy)
    passed_over = [one.message for one in said.records if "has a head that cannot draft" in one.message]
    assert len(passed_over) == 2 and "of size 576" in passed_over[0] and "of tomorrow" in passed_over[1]
    with pytest.raises(UsageError, match="reads hidden states of size 576"):
        polydraft.load(str(target), str(target / "head"))


def test_a_head_that_was_trained_for_the_target_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(SHIPPED, tmp_path / "trained")
    monkeypatch.delenv("POLYDRAFT_PROFILE")
    remember_draft("org/model", tmp_path / "trained")
    assert default_draft("org/model") == str(tmp_path / "trained")
    monkeypatch.setenv("POLYDRAFT_PROFILE", "none")
    assert default_draft("org/model") == "none"
    monkeypatch.delenv("POLYDRAFT_PROFILE")
    shutil.rmtree(tmp_path / "trained")
    assert default_draft("org/model") == "none"


def test_a_profile_of_a_model_without_a_draft_is_followed(roomy: str, tmp_path: Path) -> None:
    options = LoadOptions(roomy, dtype="float32", device="cpu", profile=str(tmp_path / "profile.json"))
    place = resolve_device("cpu")
    origin = origin_of(options, "none", place, resolve_dtype("float32", place))
    pick = Pick(temperature=0.0, batch=1, tree="dynamic:8", drafter="lookup", speedup=1.5)
    Profile(origin=origin, picks=[pick]).write(tmp_path / "profile.json")
    assert load_with(options).drafter.name == "lookup"


def test_a_containers_limit_counts_as_what_is_free(tmp_path, monkeypatch):
    cpu, files = torch.device("cpu"), {"max": "3000000", "current": "2500000", "stat": "anon 1\ninactive_file 400000\n"}
    free = devices.free_bytes(cpu)
    monkeypatch.setattr(devices, "_CONTAINER", tmp_path)
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert devices.free_bytes(cpu) == 900_000 < free, "files that were read give way"
    (tmp_path / "memory.current").write_text("9999999")
    assert devices.free_bytes(cpu) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.free_bytes(cpu) > 900_000
