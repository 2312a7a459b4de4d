"""Files that are whole or not there at all."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from polydraft.output import partial_beside, partial_folder, remove_leftovers, written_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from polydraft.output import written_whole

with written_whole(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_IN_A_FOLDER = """
import os, signal, sys
from pathlib import Path
from polydraft.output import partial_folder

with partial_folder(Path(sys.argv[1])) as partial:
    (partial / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
TERMINATED = """
import signal, sys, time
from pathlib import Path
from polydraft.cli import main
from polydraft.output import partial_folder

def work(**_):
    with partial_folder(Path(sys.argv[1])) as partial:
        (partial / "weights").write_text("half")
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)

main.cli.main = work
main.main([])
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_the_place_of_the_old_one_at_the_end(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with written_whole(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old" and partial.parent == tmp_path
    assert file.read_text() == "new" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("before", ["old", None])
def test_an_exception_in_the_middle_leaves_the_old_file_and_no_litter(before, error, tmp_path):
    file = tmp_path / "file"
    if before:
        file.write_text(before)
    with pytest.raises(error), written_whole(file) as partial:
        partial.write_text("half")
        raise error
    assert names(tmp_path) == (["file"] if before else [])
    assert not before or file.read_text() == before


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert file.read_text() == "old"
    with written_whole(file) as partial:  # what the kill left is in nobody's way
        partial.write_text("new")
    assert file.read_text() == "new"


def test_writers_at_the_same_time_do_not_mix(tmp_path):
    file, together, seen = tmp_path / "file", threading.Barrier(4, timeout=60), []

    def write(letter):
        for _ in range(20):
            with written_whole(file) as partial:
                together.wait()  # all of them are in the middle now
                partial.write_text(letter * 1000)
            seen.append(file.read_text())

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(seen) == 80 and all(text == text[0] * 1000 for text in seen)
    assert names(tmp_path) == ["file"]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    with written_whole(tmp_path / "file") as partial:
        partial.write_text("new")
    (tmp_path / "other").write_text("new")
    assert os.stat(tmp_path / "file").st_mode == os.stat(tmp_path / "other").st_mode


def test_the_first_failure_is_the_one_that_is_told(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="first"), written_whole(tmp_path / "file" / "below"):
        raise OSError("first")


def test_of_a_folder_nothing_is_left_either(tmp_path):
    with pytest.raises(ValueError), partial_beside(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "file").write_text("half")
        raise ValueError
    assert names(tmp_path) == []
    with partial_beside(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "file").write_text("whole")
        os.replace(partial, tmp_path / "folder")
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == ["file"]


def test_what_a_kill_leaves_is_removed_by_the_next_to_write_it(tmp_path):
    for name in ("folder", "other"):
        ended = subprocess.run([sys.executable, "-c", KILLED_IN_A_FOLDER, str(tmp_path / name)], check=False)
        assert ended.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) == 2 and left[0].startswith(".folder.") and left[1].startswith(".other.")
    with partial_folder(tmp_path / "folder"):
        assert {*left} < {*names(tmp_path)}, "what is young may be at work, on its way to its lock"
    for name in left:
        os.utime(tmp_path / name, (0, 0))
    with partial_folder(tmp_path / "folder") as partial:
        assert names(tmp_path) == sorted([partial.name, left[1]])
    remove_leftovers(tmp_path, "other")
    assert names(tmp_path) == []


def test_no_sweep_takes_what_is_at_work_or_not_ours(tmp_path):
    others = [".git", ".folder", ".folder.abc", "folder.0123456789abcdef"]
    for name in others:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    with partial_folder(tmp_path / "folder") as partial:
        os.utime(partial, (0, 0))
        remove_leftovers(tmp_path, "folder")
        assert names(tmp_path) == sorted([*others, partial.name])
    assert names(tmp_path) == sorted(others)
    remove_leftovers(tmp_path / "nowhere", "folder")


def test_a_command_that_is_told_to_end_leaves_nothing_half_written(tmp_path):
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "folder")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "polydraft: error: terminated\n")
    assert names(tmp_path) == []


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    with written_whole(link) as partial:
        partial.write_text("new")
    assert link.is_symlink() and file.read_text() == "new" and names(tmp_path / "there") == ["file"]


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with written_whole(pipe) as place:
        place.write_text("new")
    reader.join(timeout=10)
    assert read == ["new"] and pipe.is_fifo()
