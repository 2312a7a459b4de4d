"""Rules about the code itself: who may import whom, who may print, how things are called."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import polydraft
import polydraft.papers
from polydraft.draft import LOSSY_DRAFTERS
from polydraft.draft.gram_source import RIDERS
from polydraft.draft.trie_builder import LOSSY_TRIES

SOURCE = Path(polydraft.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = [
    "errors",
    "devices",
    "output",
    "registry",
    "operations",
    "described",
    "prompt_records",
    "prompts",
    "rows",
    "sampling",
    "trees",
    "verify",
    "models",
    "ngrams",
    "draft",
    "papers",
    "engine",
    "beam",
    "options",
    "defaults",
    "advice",
    "profile",
    "backends",
    "automatic",
    "loading",
    "hf_generate",
    "certify",
    "tune",
    "train",
    "serve",
    "batch",
    "cli",
    "lab",
    "__main__",
]
"""From the ground up: a room may import itself and what stands before it."""
PRINTING_ROOMS = {"lab", "cli"}
NEEDING_EXTRAS = {"serve", "batch", "backends"}
"""Rooms that whoever lacks an extra never enters: they import its packages freely."""
MOST_FILES_THAT_ASK_FOR_DEVICE_TYPES = 10
FORBIDDEN_NAMES = {"utils", "util", "helpers", "misc", "common"}


def room_of(path):
    """The room a file belongs to; None for the package's own front door."""
    first = path.relative_to(SOURCE).parts[0]
    return None if first == "__init__.py" else first.removesuffix(".py")


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def imports_of(path):
    """Statements of a file that import something."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def modules_imported(path, nodes=None):
    """Names of polydraft modules that a file imports, inside functions too, as full dotted names."""
    package = ("polydraft", *path.relative_to(SOURCE).parts[:-1])
    for node in imports_of(path) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "polydraft")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if module == "polydraft":  # from polydraft import x: x may be a room, or a name behind the front door
                yield from (f"polydraft.{alias.name}" for alias in node.names)
            elif module.split(".")[0] == "polydraft":
                yield module


def at_import(path):
    """Statements that run when a module is imported: not those of functions, nor those for type checkers."""
    waiting = list(parsed(path).body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def packages_at_import(path):
    """Top-level packages that importing a module imports."""
    for node in at_import(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def allowed(room, module):
    """Whether a file of `room` may import `module`."""
    parts = module.split(".")
    if room is None:
        return len(parts) > 1 and parts[1] not in ("backends", "cli", "lab", "__main__")
    if len(parts) == 1 or parts[1] not in ROOMS:  # the front door, which knows nearly every room
        return room in PRINTING_ROOMS
    if parts[1] == "backends":  # `operations` finds them by name
        return room == "backends"
    if room == "cli" and parts[1] == "lab":  # inside functions; see below
        return True
    return ROOMS.index(parts[1]) <= ROOMS.index(room)


def private(name):
    """Whether a name is its owner's own."""
    return name.startswith("_") and not name.startswith("__")


def is_module(name):
    """Whether a dotted name is that of a module or package of ours."""
    place = SOURCE.joinpath(*name.split(".")[1:])
    return place.with_suffix(".py").exists() or place.is_dir()


def wrongs(check):
    """What a rule finds wrong, file by file."""
    found = {str(path.relative_to(SOURCE)): check(path) for path in FILES}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_every_file_has_a_known_room():
    assert len(FILES) > 100
    assert not wrongs(lambda path: room_of(path) not in [None, *ROOMS]), "add the new room to ROOMS, at its place"


def test_imports_run_downwards_only():
    def wrong(path):
        room = room_of(path)
        return [module for module in modules_imported(path) if not allowed(room, module)]

    assert not wrongs(wrong)


def test_the_import_rule_is_able_to_fail():
    assert not allowed("sampling", "polydraft.engine.loop")
    assert not allowed("engine", "polydraft.loading")
    assert not allowed("models", "polydraft")
    assert not allowed("models", "polydraft.Decoder")
    assert not allowed("lab", "polydraft.backends.native.build") and allowed("backends", "polydraft.backends.native.build")
    assert allowed("cli", "polydraft.load") and allowed("engine", "polydraft.trees")


def test_the_product_does_not_know_the_laboratory():
    """Only `cli` imports `lab`, and only inside functions: whoever generates and serves never loads any of it."""

    def wrong(path):
        nodes = at_import(path) if room_of(path) == "cli" else None
        known = [] if room_of(path) in ("lab", "__main__") else modules_imported(path, nodes)
        return [module for module in known if module.split(".")[1:2] == ["lab"]]

    assert not wrongs(wrong)


@pytest.mark.parametrize("room", ["loading", "hf_generate"])
def test_whoever_loads_imports_the_papers(room):
    """The rooms below know papers by their registries only, which importing the package fills."""
    assert "polydraft.papers" in modules_imported(SOURCE / f"{room}.py", at_import(SOURCE / f"{room}.py"))
    assert [*RIDERS, *LOSSY_TRIES, *LOSSY_DRAFTERS] == ["branches", "drawn-branches", "flat-blocks", "target-init"]


@pytest.mark.slow  # a process that imports torch, to show what the test above concludes
@pytest.mark.parametrize("room", ["loading", "hf_generate"])
def test_what_papers_add_is_there_for_whoever_loads(room):
    names = (
        "LOSSY_DRAFTERS; from polydraft.draft.gram_source import RIDERS; from polydraft.draft.trie_builder import LOSSY_TRIES"
    )
    asked = f"from polydraft.draft import {names}"
    shown = "print(*RIDERS, *LOSSY_TRIES, *LOSSY_DRAFTERS)"
    script = f"import polydraft.{room}; {asked}; {shown}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["branches", "drawn-branches", "flat-blocks", "target-init"]


def test_every_command_is_there_without_extras():
    """Packages of extras are imported where they are used, so that importing a module needs none of them."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", one).group() for one in project["dependencies"]}
    known = {"polydraft", *needed, *sys.stdlib_module_names}

    def wrong(path):
        return [] if room_of(path) in NEEDING_EXTRAS else {*packages_at_import(path)} - known

    assert not wrongs(wrong)


def test_few_files_ask_what_type_a_device_is():
    """What devices can do stands in `polydraft.devices`; the rest names a type for torch, or for a report."""

    def asks(path):
        types = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute) and node.attr == "type"]
        return [node.lineno for node in types if re.search(r"device|place", ast.unparse(node.value))]

    asking = wrongs(asks)
    assert "devices.py" in asking, "the rule sees nothing"
    assert len(asking) <= MOST_FILES_THAT_ASK_FOR_DEVICE_TYPES, f"use polydraft.devices instead in some of {asking}"


def test_nobody_reads_private_names_of_other_modules():
    """Private modules are their package's own. What an object keeps to itself is not seen here."""

    def wrong(path):
        package = ".".join(("polydraft", *path.relative_to(SOURCE).parts[:-1]))
        modules, found = set(), []
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                ours = node.level or (node.module or "").split(".")[0] == "polydraft"
                for alias in node.names if ours else ():
                    if private(alias.name) and not is_module(f"{package}.{alias.name}"):
                        found.append(f"{node.lineno}: {alias.name}")
                    if is_module(f"{node.module}.{alias.name}"):
                        modules.add(alias.asname or alias.name)
            elif isinstance(node, ast.Import):
                modules |= {alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] == "polydraft"}
        reads = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute) and private(node.attr)]
        return found + [f"{node.lineno}: {ast.unparse(node)}" for node in reads if ast.unparse(node.value) in modules]

    assert not wrongs(wrong)


def test_nothing_prints_but_command_line_and_bench():
    def prints(path):
        calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        printing = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        return [] if room_of(path) in PRINTING_ROOMS else printing

    assert not wrongs(prints), "print() in these lines"


def test_modules_are_named_for_what_they_are():
    assert not wrongs(lambda path: FORBIDDEN_NAMES & {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts})


def test_every_module_says_what_it_is():
    assert not wrongs(lambda path: not ast.get_docstring(parsed(path))), "begin with a line that says it"


def test_the_rules_see_every_file(tmp_path, monkeypatch):
    """Planted errors are found, so that a rule that loops over nothing would show."""
    bad = tmp_path / "engine"
    bad.mkdir()
    lines = ("import scipy", "from polydraft.lab import svg", "from polydraft.trees import _depths", "print(svg)")
    (bad / "utils.py").write_text("\n".join(lines))
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    monkeypatch.setitem(globals(), "FILES", sorted(tmp_path.rglob("*.py")))
    for rule in (
        test_imports_run_downwards_only,
        test_the_product_does_not_know_the_laboratory,
        test_every_command_is_there_without_extras,
        test_nobody_reads_private_names_of_other_modules,
        test_nothing_prints_but_command_line_and_bench,
        test_modules_are_named_for_what_they_are,
        test_every_module_says_what_it_is,
    ):
        with pytest.raises(AssertionError):
            rule()


def test_the_front_door_is_narrow_and_true():
    names = polydraft.__all__
    assert 0 < len(names) <= 15
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(polydraft, name, None) is not None or importlib.import_module(f"polydraft.{name}")


def test_the_page_says_how_large_the_rooms_are():
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (\d+\.\d) \|", page.split("## How large it is")[1], re.MULTILINE)
    said = {names: float(thousands) for names, thousands in rows}
    rooms = {room for names in said for room in re.findall(r"`(\w+)/`", names)}
    assert rooms == {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    for names, thousands in said.items():
        folders = [SOURCE / room for room in re.findall(r"`(\w+)/`", names)]
        files = [file for folder in folders for file in folder.rglob("*.py")] or SOURCE.glob("*.py")
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert lines / 1000 == pytest.approx(thousands, rel=0.1), f"{names} has {lines} lines"
