"""Rules about the code itself: who may import whom, how large a file may grow, who may print."""

import ast
import importlib
from pathlib import Path

import pytest

import polydraft

SOURCE = Path(polydraft.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = [
    "errors",
    "atomic",
    "output",
    "registry",
    "svg",
    "prompts",
    "compilation",
    "sampling",
    "trees",
    "schemes",
    "walks",
    "theory",
    "models",
    "identity",
    "ngrams",
    "decision",
    "drafters",
    "papers",
    "engine",
    "beam",
    "loading",
    "hf_generate",
    "certify",
    "analyze",
    "train",
    "bench",
    "cli",
    "__main__",
]
"""From the ground up: a room may import itself and what stands before it."""
MAX_LINES = 400
PRINTING_ROOMS = {"bench", "cli"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "misc", "common"}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))


def room_of(path):
    """The room a file belongs to; None for the package's own front door."""
    first = path.relative_to(SOURCE).parts[0]
    return None if first == "__init__.py" else first.removesuffix(".py")


def modules_imported(path):
    """Names of polydraft modules that a file imports, inside functions too, as full dotted names."""
    package = ("polydraft", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "polydraft")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if module == "polydraft":  # from polydraft import x: x may be a room, or a name behind the front door
                yield from (f"polydraft.{alias.name}" for alias in node.names)
            elif module.split(".")[0] == "polydraft":
                yield module


def allowed(room, module):
    """Whether a file of `room` may import `module`."""
    parts = module.split(".")
    if room is None:
        return len(parts) > 1 and parts[1] not in ("cli", "bench", "__main__")
    if len(parts) == 1 or parts[1] not in ROOMS:  # the front door, which knows nearly every room
        return room in PRINTING_ROOMS
    return ROOMS.index(parts[1]) <= ROOMS.index(room)


@every_file
def test_every_file_has_a_known_room(path):
    assert room_of(path) in [None, *ROOMS], "add the new room to ROOMS, at its place"


@every_file
def test_imports_run_downwards_only(path):
    room = room_of(path)
    wrong = [module for module in modules_imported(path) if not allowed(room, module)]
    assert not wrong, f"{room} must not import {wrong}"


def test_the_import_rule_is_able_to_fail():
    assert not allowed("sampling", "polydraft.engine.loop")
    assert not allowed("engine", "polydraft.loading")
    assert not allowed("models", "polydraft")
    assert not allowed("models", "polydraft.Decoder")
    assert allowed("cli", "polydraft.load") and allowed("engine", "polydraft.trees")


@every_file
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@every_file
def test_nothing_prints_but_command_line_and_bench(path):
    if room_of(path) in PRINTING_ROOMS:
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    lines = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not lines, f"print() in line {lines}"


@every_file
def test_modules_are_named_for_what_they_are(path):
    parts = path.relative_to(SOURCE).parts
    assert not FORBIDDEN_NAMES & {part.removesuffix(".py") for part in parts}


@every_file
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a module starts with a line that says what it is for"


def test_the_front_door_is_narrow_and_true():
    names = polydraft.__all__
    assert 0 < len(names) <= 15
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(polydraft, name, None) is not None or importlib.import_module(f"polydraft.{name}")
