"""Distributions are kept, and never trusted blindly."""

import json
import os
from pathlib import Path

import pytest

from covering import keeping
from polydraft.lab.analyze.analysis import DistributionStore
from polydraft.models.hf import HFModel

OPTIONS = ("--json", "--temperature", "1", "--drafts", "2", "--positions", "10")


@pytest.fixture
def exploding(monkeypatch: pytest.MonkeyPatch):
    """Make every model refuse to work from now on."""

    def explode(*arguments, **options) -> None:
        raise RuntimeError("a model was run")

    def start() -> None:
        monkeypatch.setattr(HFModel, "__init__", explode)
        monkeypatch.setattr(HFModel, "forward", explode)

    return start


@pytest.mark.parametrize("out", [True, False])
def test_another_scheme_runs_no_model(analyze, exploding, tmp_path: Path, own_cache: Path, out: bool) -> None:
    place = ("--out", str(tmp_path / "out")) if out else ()
    first = json.loads(analyze(*OPTIONS, *place, "--schemes", "race,rrs-wr")[1])["rows"]
    kept = list((tmp_path / "out" / "cache" if out else own_cache / "distributions").iterdir())
    assert [file.suffix for file in kept] == [".safetensors"]
    exploding()
    code, text, err = analyze(*OPTIONS, *place, "--schemes", "race,greedy", "--drafts", "2,3")
    assert code == 0, err
    assert json.loads(text)["rows"][0] == first[0]


CHANGES = {
    "--seed": "1",
    "--temperature": "0.9",
    "--draft-temperature": "0.9",
    "--max-new-tokens": "7",
    "--positions": "9",
    "--draft": "early-exit:1",
    "--limit": "3",
    "--raw": None,
}


@pytest.mark.parametrize("option", keeping(CHANGES, "--seed", "--temperature", "--positions", "--draft", "--raw"))
def test_other_settings_need_other_distributions(analyze, exploding, tmp_path: Path, option: str) -> None:
    value = CHANGES[option]
    change = (option,) if value is None else (option, value)
    options = (*OPTIONS, "--schemes", "race", "--out", str(tmp_path))
    assert analyze(*options)[0] == 0
    exploding()
    with pytest.raises(RuntimeError, match="a model was run"):
        analyze(*options, *change)


def test_a_changed_draft_makes_kept_distributions_stale(analyze, exploding, drafts: dict[str, str], tmp_path: Path) -> None:
    options = (*OPTIONS, "--schemes", "race", "--out", str(tmp_path), "--draft", drafts["head"])
    assert analyze(*options)[0] == 0
    weights = Path(drafts["head"]) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    os.utime(weights, ns=(before, before + 1))
    exploding()
    try:
        with pytest.raises(RuntimeError, match="a model was run"):
            analyze(*options)
    finally:
        os.utime(weights, ns=(before, before))


def damaged(content: bytes, how: str) -> bytes:
    """Spoil a file of distributions."""
    if how == "torn":
        return content[: len(content) // 2]
    if how == "empty":
        return b""
    if how == "foreign":
        return b"something else altogether"
    place = len(content) - 1000  # within the numbers, where the format itself notices nothing
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("how", keeping(["torn", "empty", "foreign", "flipped"], "torn", "flipped"))
def test_damaged_distributions_are_collected_again(analyze, exploding, tmp_path: Path, how: str) -> None:
    options = (*OPTIONS, "--schemes", "race,kseq", "--out", str(tmp_path))
    first = json.loads(analyze(*options)[1])["rows"]
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(damaged(file.read_bytes(), how))
    code, out, err = analyze(*options)
    assert code == 0 and "again" in err
    assert json.loads(out)["rows"] == first
    exploding()
    assert json.loads(analyze(*options)[1])["rows"] == first, "and they are kept again"


def test_distributions_of_another_origin_are_not_taken(analyze, tmp_path: Path) -> None:
    options = ("--json", "--drafts", "2", "--positions", "10", "--schemes", "race", "--out", str(tmp_path))
    warm = json.loads(analyze(*options, "--temperature", "1")[1])["rows"]
    (file,) = (tmp_path / "cache").iterdir()
    cold = json.loads(analyze(*options, "--temperature", "0.5")[1])["rows"]
    (other,) = set((tmp_path / "cache").iterdir()) - {file}
    other.write_bytes(file.read_bytes())
    assert json.loads(analyze(*options, "--temperature", "0.5")[1])["rows"] == cold != warm


def test_where_nothing_can_be_kept_figures_come_all_the_same(analyze, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "file"))
    code, out, err = analyze(*OPTIONS, "--schemes", "race")
    assert code == 0 and json.loads(out)["rows"] and "distributions are not kept" in err


def test_the_users_cache_stays_small(analyze, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.lab.commands.analyze._KEPT_BYTES", 1)
    for temperature in ("0.5", "1"):
        assert analyze("--json", "--schemes", "race", "--drafts", "2", "--temperature", temperature)[0] == 0
    (kept,) = (own_cache / "distributions").iterdir()
    assert DistributionStore(own_cache / "distributions").load({}) is None and kept.stat().st_size > 1
