"""The folder that a GGUF file is converted into: interrupted, full, shared by two processes, damaged, left behind."""

import errno
import os
import shutil
import threading
import time

import pytest
import torch

from polydraft.errors import FailureError
from polydraft.models.gguf import conversion
from polydraft.models.gguf.folder import convert, converted_folder, is_complete
from polydraft.models.loading import load_model
from polydraft.output import locked

gguf = pytest.importorskip("gguf")

from models.gguf_cases import tiny, write  # noqa: E402  it needs the package

CPU = torch.device("cpu")


class Stop(BaseException):
    pass


def test_an_interrupted_conversion_goes_on_where_it_was(tmp_path, cache, caplog):
    file = write(tmp_path / "tiny.gguf", tiny())
    folder, files = cache / "gguf" / "one", []

    def stop(self, shard, folder, advance):
        if len(files) == 2:
            (folder / ".half").write_bytes(b"a kill leaves that")
            raise Stop
        files.append(shard.file)
        usual(self, shard, folder, advance)

    usual = conversion.Conversion.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion.Conversion, "write", stop)
        with pytest.raises(Stop):
            convert(file, folder, torch.float32, shard_bytes=1)
    assert not is_complete(folder) and [(folder / name).exists() for name in files] == [True, True]
    before = [(folder / name).stat().st_mtime_ns for name in files]
    with caplog.at_level("INFO", logger="polydraft"):
        convert(file, folder, torch.float32, shard_bytes=1)
    assert is_complete(folder) and "of it there already" in caplog.text
    assert [(folder / name).stat().st_mtime_ns for name in files] == before
    assert not list(folder.glob(".*"))


def test_a_file_that_is_being_written_is_gone_after_an_interruption(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny())

    def advance(self, done):
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tqdm.tqdm.update", advance)
        with pytest.raises(Stop):
            convert(file, cache / "one", torch.float32)
    assert not list((cache / "one").glob("*.safetensors")) and not list((cache / "one").glob(".*"))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "tiny.gguf", tiny())

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        FailureError, match=r"could not convert tiny.gguf into .* \(No space left on device\); free some space, or"
    ):
        converted_folder(file, torch.float32)
    assert not list((cache / "gguf").iterdir())


def test_a_cache_that_cannot_be_written_to_is_one_line(tmp_path, monkeypatch):
    file = write(tmp_path / "tiny.gguf", tiny())
    (tmp_path / "cache").touch()
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FailureError, match=r"cannot write to .*cache/gguf \(Not a directory\); set POLYDRAFT_CACHE to another"):
        load_model(str(file), CPU, torch.float32)


def test_a_second_process_waits_for_the_first(tmp_path, cache, caplog):
    file = write(tmp_path / "tiny.gguf", tiny())
    folder = converted_folder(file, torch.float32)
    (folder / "manifest.json").rename(tmp_path / "manifest.json")
    caplog.clear()
    found = []
    with caplog.at_level("INFO", logger="polydraft"), locked(folder, None) as held:
        assert held
        waiting = threading.Thread(target=lambda: found.append(converted_folder(file, torch.float32)))
        waiting.start()
        deadline = time.monotonic() + 60
        while "another process is converting tiny.gguf; waiting" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not found and "another process is converting tiny.gguf; waiting" in caplog.text
        shutil.copy(tmp_path / "manifest.json", folder / "manifest.json")
    waiting.join(60)
    assert found == [folder] and caplog.text.count("converting tiny.gguf, once") == 0


def test_a_damaged_folder_is_mended(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny())
    folder = converted_folder(file, torch.float32)
    expected = load_model(str(file), CPU, torch.float32).model.plain(torch.tensor([[5, 6]]))
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, 100)
    assert not is_complete(folder)
    assert torch.equal(load_model(str(file), CPU, torch.float32).model.plain(torch.tensor([[5, 6]])), expected)
    (folder / "manifest.json").write_text("{")
    assert converted_folder(file, torch.float32) == folder and is_complete(folder)


def test_what_nobody_goes_on_from_is_removed_in_the_end(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny())
    folders = {name: cache / "gguf" / name for name in ("young", "old")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"whole")
        (folder / ".model-00002-of-00002.safetensors.0123456789abcdef").write_bytes(b"half")
    os.utime(folders["old"], (0, 0))
    converted_folder(file, torch.float32)
    assert [path.name for path in folders["young"].iterdir()] == ["model-00001-of-00002.safetensors"]
    assert not folders["old"].exists()
