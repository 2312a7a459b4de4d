"""Options that are derived from dataclasses, and how help shows them."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import click
import pytest
from click.testing import CliRunner

from polydraft.cli.chat import command as chat
from polydraft.cli.generate import command as generate
from polydraft.cli.options import GroupedCommand, options_of, settings_of, taken
from polydraft.errors import UsageError

MOST = 40
"""Options that anybody can look through."""
FIRST = "--target --draft --tree --temperature --top-p --max-new-tokens --seed --raw --compare --json"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes."""

    width: int
    """Never asked for."""
    depth: int = 3
    """How deep,
    in levels."""
    share: float | None = None
    """A share  [default: all]."""


@dataclass(frozen=True, kw_only=True)
class Example(Size):
    """All there is."""

    names: tuple[str, ...] = ()
    """Names."""
    file: Path = Path("here")
    """A file."""
    kind: Literal["one", "two"] | None = None
    """One of two."""
    fast: bool = True
    """Hurry."""
    loud: bool = False
    """Shout."""


@click.command(cls=GroupedCommand)
@options_of(Example, skip=("width",), share={"flag": "--part"})
def command(**options: object) -> None:
    """Try."""
    click.echo(repr(taken(Example, {"width": 1, **options})))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Example(width=1)),
        (["--depth", "5", "--part", "0.5", "--loud", "--no-fast"], Example(width=1, depth=5, share=0.5, loud=True, fast=False)),
        (["--names", "a", "--names", "b", "--kind", "two"], Example(width=1, names=("a", "b"), kind="two")),
        (["--file", "x"], Example(width=1, file=Path("x"))),
    ],
)
def test_fields_are_options(arguments: list[str], expected: Example) -> None:
    assert CliRunner().invoke(command, arguments, catch_exceptions=False).output == f"{expected!r}\n"


@pytest.mark.parametrize("arguments", [["--width", "2"], ["--kind", "three"], ["--depth", "x"], ["--share", "1"]])
def test_what_is_no_option_or_value_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(command, arguments).exit_code == 2


def test_docstrings_are_help_and_classes_are_headings() -> None:
    lines = [" ".join(line.split()) for line in CliRunner().invoke(command, ["--help"]).output.splitlines()]
    assert lines.index("Options:") < lines.index("All there is:") < lines.index("Sizes:")
    for line in (
        "--depth INTEGER How deep, in levels. [default: 3]",
        "--part FLOAT A share [default: all].",
        "--fast / --no-fast Hurry. [default: fast]",
        "--kind [one|two] One of two.",
    ):
        assert line in lines


def test_generate_shows_ten_options_first_and_leaves_none_out() -> None:
    output = CliRunner().invoke(generate, ["--help"]).output
    first, *others = output[output.index("\nOptions:") :].split("\n\n")
    shown = [line.split()[0] for line in first.splitlines() if line.startswith("  --")]
    assert [name for name in shown if name != "--help"] == FIRST.split()
    headings = [part.strip().splitlines()[0] for part in others]
    assert headings == [
        "Sampling:",
        "Target:",
        "Drafting and verification:",
        "Drafting from n-grams:",
        "Machine:",
        "GPUs:",
        "Beams and several samples:",
        "Expert settings:",
    ]
    assert len(generate.params) <= MOST, "what only experts need is set by --set"
    for subject in (generate, chat):
        listed = CliRunner().invoke(subject, ["--help"]).output.split()
        options = [parameter for parameter in subject.params if isinstance(parameter, click.Option)]
        assert options and all(name in listed for option in options for name in option.opts)


@dataclass(frozen=True, kw_only=True)
class Deep:
    """Where it is described."""

    steps: int | None = None
    """Number of steps."""
    no_rest: bool = False
    """Run through."""
    pace: float = 0.5
    """How fast."""


@dataclass(frozen=True, kw_only=True)
class Shallow:
    """Experts."""

    described_in: ClassVar[str] = f"{__name__}:Deep"

    steps: int | None = None
    no_rest: bool = False
    """Do not stop."""
    pace: float = 0.5


@click.command(cls=GroupedCommand)
@click.argument("name")
@settings_of(Shallow, only=("steps", "no_rest", "pace"))
def expert(name: str, **options: object) -> None:
    """Try."""
    click.echo(repr(taken(Shallow, dict(options))))


def test_settings_are_fields_too() -> None:
    def run(*arguments: str) -> object:
        return CliRunner().invoke(expert, ["x", *arguments], catch_exceptions=False).output.strip()

    assert run() == repr(Shallow())
    assert run("--set", "steps=3", "--set", "rest=no") == repr(Shallow(steps=3, no_rest=True))
    assert run("--set", "steps=3", "--set", "steps = 4") == repr(Shallow(steps=4)), "the last one counts"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stepps=3", "unknown name in --set 'stepps'; did you mean 'steps'? allowed: pace, rest, steps"),
        ("steps", "--set steps has no value; write --set steps=INTEGER"),
        ("steps=few", "steps='few' is out of range; allowed: whole numbers"),
        ("rest=maybe", "rest='maybe' is out of range; allowed: yes, no"),
    ],
)
def test_wrong_settings_say_what_is_allowed(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        CliRunner().invoke(expert, ["x", "--set", setting], catch_exceptions=False)
    assert str(error.value) == message


def test_settings_describe_themselves() -> None:
    shown = CliRunner().invoke(expert, ["--set", "help"])
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert shown.exit_code == 0, "although the argument is missing"
    assert lines[1:] == ["steps=INTEGER Number of steps.", "rest=no Do not stop.", "pace=FLOAT How fast. [default: 0.5]"]
