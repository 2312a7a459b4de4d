"""The life of a profile: written, used, ignored with a line, or refused."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from polydraft.errors import UsageError
from polydraft.loading import load, load_with
from polydraft.options import LoadOptions
from polydraft.profile import VARIABLE, Pick, Profile, origin_of, profile_file, tuned

CPU = torch.device("cpu")
DRAFT = "early-exit:1"
PICKS = [
    Pick(temperature=0.0, batch=1, tree="3x1", speedup=1.4),
    Pick(temperature=0.0, batch=16, tree="none", speedup=1.0),
    Pick(temperature=1.0, batch=1, tree="none", drafter="lookup", speedup=1.2),
]


@pytest.fixture
def options(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadOptions:
    """Of a pair whose profile is in the cache."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    options = LoadOptions(tiny, DRAFT, device="cpu", dtype="float32")
    written(options).write(profile_file(tiny, DRAFT, CPU, torch.float32))
    return options


def written(options: LoadOptions, **changes: str) -> Profile:
    origin = {**origin_of(options, DRAFT, CPU, torch.float32), **changes}
    return Profile(origin=origin, picks=PICKS, figures={"made": "today"})


def found(options: LoadOptions, batch: int = 1, temperature: float | None = 0.0) -> Pick | None:
    return tuned(options, DRAFT, CPU, torch.float32, batch=batch, temperature=temperature)


def test_what_was_written_is_used(options: LoadOptions, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert found(options) == PICKS[0] and found(options, temperature=None) == PICKS[0]
    assert found(options, batch=12) == PICKS[1] and found(options, batch=3) == PICKS[0]
    assert found(options, temperature=0.8) == PICKS[2]
    decoder = load_with(options)
    assert decoder.drafter.topology is not None and decoder.drafter.topology.num_nodes == 7
    assert "tree 3x1, as tuned on this machine" in caplog.text
    assert load_with(options, temperature=1.0).drafter.name == "lookup"
    assert load_with(options, batch=32).drafter.name == "none"


@pytest.mark.parametrize(
    "given",
    [
        {"tree": "2x1"},
        {"drafter": "suffix", "draft": "none"},
        {"scheme": "rrs-wor"},
        {"walk": "node"},
        {"draft_temperature": 0.5},
        {"profile": "none"},
    ],
)
def test_what_is_asked_for_comes_first(options: LoadOptions, given: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decoder = load_with(dataclasses.replace(options, **given))
    assert getattr(decoder.drafter.topology, "num_nodes", 0) != 7 and "tuned" not in caplog.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("machine", "another machine"),
        ("version", "another version"),
        ("pair", "another pair"),
        ("files", "another state of the model files"),
    ],
)
def test_others_profiles_are_ignored_with_a_line(
    options: LoadOptions, name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    written(options, **{name: "elsewhere"}).write(profile_file(options.target, DRAFT, CPU, torch.float32))
    assert found(options) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert says in line and "elsewhere" in line and "polydraft tune" in line and "\n" not in line


def test_threads_are_part_of_the_machine(options: LoadOptions, caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    assert found(options) is None and "2 threads" in caplog.text


def test_a_temperature_that_was_not_tuned_for(options: LoadOptions, caplog: pytest.LogCaptureFixture) -> None:
    assert found(options, temperature=2.0) is None
    assert "tuned for T=0 with batch size 1, T=0 with batch size 16, T=1 with batch size 1, not for T=2" in caplog.text


def test_a_batch_size_that_was_not_tuned_for(options: LoadOptions, caplog: pytest.LogCaptureFixture) -> None:
    assert found(options, batch=64) == PICKS[1]
    assert found(options, batch=65) is None and "not for T=0 with batch size 65" in caplog.text
    assert found(options, batch=5, temperature=1.0) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 9}', '{"format": 2, "origin": {}, "picks": []}', "tree"])
def test_a_broken_profile_is_ignored_with_a_line(options: LoadOptions, content: str, caplog: pytest.LogCaptureFixture) -> None:
    profile_file(options.target, DRAFT, CPU, torch.float32).write_text(content)
    assert found(options) is None
    assert len(caplog.records) == 1 and "is ignored" in caplog.text and "run polydraft tune again" in caplog.text


def test_a_mistyped_tree_is_ignored_with_a_line(options: LoadOptions, caplog: pytest.LogCaptureFixture) -> None:
    file = profile_file(options.target, DRAFT, CPU, torch.float32)
    content = json.loads(file.read_text())
    content["picks"][0]["tree"] = "bush"
    file.write_text(json.dumps(content))
    assert found(options) is None and "unknown tree 'bush'" in caplog.text


def test_a_file_of_ones_own(options: LoadOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    written(options).write(file)
    profile_file(options.target, DRAFT, CPU, torch.float32).unlink()
    assert found(options) is None
    assert found(dataclasses.replace(options, profile=str(file))) == PICKS[0]
    monkeypatch.setenv(VARIABLE, str(file))
    assert found(options) == PICKS[0]
    monkeypatch.setenv(VARIABLE, "none")
    assert found(options) is None
    with pytest.raises(UsageError, match=r"cannot read profile .*gone.json"):
        found(dataclasses.replace(options, profile=str(tmp_path / "gone.json")))


def test_reading_gives_what_was_written(options: LoadOptions) -> None:
    back = Profile.read(profile_file(options.target, DRAFT, CPU, torch.float32))
    assert list(back.picks) == PICKS and back.figures == {"made": "today"}


def test_without_a_profile_nothing_changes(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert str(load(tiny, DRAFT, device="cpu", dtype="float32").drafter.topology).startswith("dynamic:8")
