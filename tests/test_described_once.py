"""Options are described once: signatures, documentation, help and method texts follow the fields."""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import polydraft
from polydraft.beam import BeamOptions
from polydraft.certify.reference import echo_pair
from polydraft.cli.certify import _decoder as certify
from polydraft.cli.generate import BeamChoices
from polydraft.cli.generate import command as generate
from polydraft.cli.options import Choices, GroupedCommand, options_of
from polydraft.defaults import DEFAULTS, NONE, PAIRS, Default, Pair, asked_for, default_tree
from polydraft.described import described_by, options_in
from polydraft.draft import TreeDrafter
from polydraft.draft.speedup import Costs
from polydraft.draft.static_plan import check_tree
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.hf_generate import SpeculateOptions
from polydraft.lab.analyze.settings import AnalyzeSettings
from polydraft.lab.bench.method import MethodSpec
from polydraft.lab.bench.options import BenchOptions, method_options
from polydraft.lab.commands.bench import command as bench
from polydraft.models.int8_copy import NAME as INT8
from polydraft.options import AUTO, BY_LOAD, COUPLED, LoadOptions, NgramOptions, TreeOptions
from polydraft.papers.decision import DEFAULT_THRESHOLD
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree
from polydraft.verify import SCHEMES

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
CHOOSING = PAGE.parent / "choosing.md"
PLACES = {"GPU": (True, "bfloat16"), "CPU, bfloat16": (False, "bfloat16"), "CPU, float32 or int8": (False, "float32")}
VERIFIERS = {0.0: ("top", "node"), 1.0: (COUPLED, "node")}
"""Scheme and walk that ``"auto"`` means at temperature 0 and above, for trees from a draft."""
COSTS = Costs(draft_level=0.1, tree_pass=lambda nodes: 1 + 0.01 * nodes)


@dataclass(frozen=True, kw_only=True)
class Wider(LoadOptions):
    """One option more."""

    patience: int | None = field(default=None, metadata={"short": "wait"})
    """Rounds to wait.

    Only Python's documentation says this."""
    no_haste: bool = False
    """Take your time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.patience < 0:
            raise UsageError(f"patience={self.patience} is out of range; allowed: 0 or more")


@described_by(Wider)
def start(options: Wider) -> Wider:
    """Begin.

    Returns
    -------
    Wider
    """
    return options


def test_a_new_field_is_a_parameter_with_its_docstring() -> None:
    assert start("tiny", patience=3) == Wider("tiny", patience=3)
    parameters = inspect.signature(start).parameters
    assert list(parameters)[:2] == ["target", "draft"] and parameters["patience"].default is None
    assert parameters["patience"].annotation == int | None and inspect.signature(start).return_annotation is Wider
    before, after = (start.__doc__ or "").split(
        "patience : int, optional\n    Rounds to wait. Only Python's documentation says this."
    )
    assert before.startswith("Begin.\n\nParameters\n----------\ntarget : Any\n") and after.endswith("Returns\n-------\nWider")
    with pytest.raises(TypeError, match="impatience"):
        start(impatience=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="patience=-1 is out of range"):
        start(patience=-1)


def test_a_new_field_is_a_flag_below_its_heading() -> None:
    @click.command(cls=GroupedCommand)
    @options_of(Wider)
    def command(**options: object) -> None:
        """Try."""
        click.echo(Wider(**options).patience)  # type: ignore[arg-type]

    shown = CliRunner().invoke(command, ["--help"]).output
    assert "One option more:\n  --patience INTEGER  Rounds to wait.\n" in shown and "Only Python" not in shown
    assert CliRunner().invoke(command, ["--patience", "4"]).output == "4\n"


def test_a_new_field_is_read_from_a_method() -> None:
    options = options_in(Wider)
    assert MethodSpec.parse("mcsd:2,wait=3,haste=no,walk=node").read(options) == {
        "patience": 3,
        "no_haste": True,
        "walk": "node",
    }
    with pytest.raises(UsageError, match=r"^method 'sd,wait=long': wait='long' is out of range; allowed: whole numbers$"):
        MethodSpec.parse("sd,wait=long").read(options)
    with pytest.raises(UsageError, match=r"has no option 'patience'; allowed: .*wait"):
        MethodSpec.parse("sd,patience=3").read(options)


@pytest.mark.parametrize(
    "kind", [LoadOptions, NgramOptions, SpeculateOptions, BenchOptions, AnalyzeSettings], ids=lambda kind: kind.__name__
)
def test_every_field_says_what_it_is(kind: type) -> None:
    described = options_in(kind)
    assert {option.name for option in described} == {one.name for one in dataclasses.fields(kind)}
    assert all(option.doc and option.heading for option in described)


def test_every_field_is_in_load_and_in_help() -> None:
    described = options_in(LoadOptions)
    assert set(inspect.signature(polydraft.load).parameters) == {option.name for option in described}
    assert all(f"\n{option.name} : " in (polydraft.load.__doc__ or "") for option in described)
    for command in (generate, certify):
        words = CliRunner().invoke(command, ["--help"]).output.split()
        settings = CliRunner().invoke(command, ["--set", "help"]).output.split()
        for option in (*described, *options_in(NgramOptions)):
            flag, setting = "--" + option.name.replace("_", "-"), option.name.removeprefix("no_")
            ways = ["no"] if option.name.startswith("no_") else ["INTEGER", "FLOAT", "TEXT", "yes|no"]
            assert (flag in words) + any(f"{setting}={way}" in settings for way in ways) == option.has_text
    assert {option.name for option in described if not option.has_text} == {"grams", "lossless", "tokenizer"}
    shown = " ".join(CliRunner().invoke(bench, ["--help"]).output.split())
    assert f"walk=node: {', '.join(option.short for option in method_options(grams=True))};" in shown


@pytest.mark.parametrize("kind", [BeamChoices, Choices, BenchOptions], ids=lambda kind: kind.__name__)
def test_every_option_of_a_command_says_what_it_is(kind: type) -> None:
    assert all(option.doc for option in options_in(kind))


def test_descriptions_are_those_of_the_classes_that_check_them() -> None:
    beams = {option.name: option.help for option in options_in(BeamOptions)}
    assert all(beams.values())
    assert {option.name for option in options_in(BeamChoices)} == set(beams)
    assert {option.name for option in options_in(BeamChoices) if option.help != beams[option.name]} == {"mode"}
    sampling = {option.name: option.help for option in options_in(SamplingParams)}
    shared = [option for option in options_in(Choices) if option.name in sampling]
    assert len(shared) >= 5 and all(option.help == sampling[option.name] for option in shared)


def test_speculate_has_the_part_that_makes_sense() -> None:
    names = {option.name for option in options_in(TreeOptions)} | {"draft", "ngrams"}
    assert set(inspect.signature(polydraft.Speculate).parameters) == names
    assert all(f"\n{name} : " in (polydraft.Speculate.__doc__ or "") for name in names)
    with pytest.raises(UsageError, match="unknown walk"):
        polydraft.Speculate(walk="run")


def test_the_page_shows_the_fields() -> None:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name in inspect.signature(polydraft.load).parameters:
        option = next(one for one in options_in(LoadOptions) if one.name == name)
        lines.append(f"| `{name}` | `{option.default!r}` | {' '.join(option.doc.split())} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"put this table into docs/python.md:\n{table}"


def trees_of(pair: Pair, *, gpu: bool, dtype: str) -> tuple[str, str]:
    """Return the trees of one text and a batch, in words."""
    if pair.draft == NONE:
        return ("none" if pair.drafter == AUTO else "whatever n-grams find",) * 2
    tree = default_tree(
        gpu=gpu, dtype=dtype, asked=asked_for(AUTO, AUTO, pair.drafter), target=pair.target, copy=pair.draft == INT8
    )
    first, _, other = tree.rpartition("/")
    alone = other.removeprefix(BY_LOAD)
    smaller = ", or a smaller one if that is faster" if BY_LOAD in tree else ""
    return f"`{first or alone}`", f"`{alone}`{smaller}"


def default_table() -> Iterator[str]:
    """Yield the lines that docs/choosing.md has of it."""
    yield "| pair | device | one text | batch |"
    yield "|---|---|---|---|"
    for pair in PAIRS:
        places = PLACES if pair.draft != NONE else {"any": (False, "float32")}
        for place, (gpu, dtype) in places.items():
            yield f"| {pair.words} | {place} | {' | '.join(trees_of(pair, gpu=gpu, dtype=dtype))} |"
    (greedy, greedy_walk), (coupled, _) = VERIFIERS.values()
    yield ""
    above = f"Above, texts are `{coupled}` ([schemes](schemes.md))."
    yield f"At temperature 0, trees are verified by `{greedy}` and `{greedy_walk}`. {above}"
    yield "Models run in bfloat16 where the hardware computes in it, else in float32."


def test_the_page_shows_the_defaults() -> None:
    table = "\n".join(default_table())
    assert table in CHOOSING.read_text(), f"put this into docs/choosing.md:\n{table}"


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_scheme_takes_its_default_tree(scheme: str) -> None:
    for gpu, dtype in ((True, "bfloat16"), (False, "bfloat16"), (False, "float32")):
        tree = default_tree(gpu=gpu, dtype=dtype, asked=asked_for(scheme, "auto"))
        check_tree(parse_tree(tree), scheme, vocab_size=1000)


def test_defaults_are_options_that_can_be_given() -> None:
    for default in DEFAULTS:
        assert LoadOptions(tree=default.tree).tree == default.tree
    for pair in PAIRS:
        assert LoadOptions(pair.target, pair.draft, drafter=pair.drafter).draft == pair.draft


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda one: f"{one.tree}, gpu={one.gpu}")
@pytest.mark.parametrize("temperature", VERIFIERS)
def test_the_default_verifiers_are_those_of_a_decoder(default: Default, temperature: float) -> None:
    options, pair = LoadOptions(tree=default.tree), echo_pair()
    (dynamic, topology), alone = options.shape, options.alone
    drafter = TreeDrafter(pair.draft, dynamic or topology, alone=alone, costs=COSTS)
    decoder = Decoder(pair.target, drafter, coupled=options.couples)
    settings = decoder.stream([1, 2], sampling=SamplingParams(temperature=temperature)).settings
    assert (settings["scheme"], settings["walk"]) == VERIFIERS[temperature]


def test_options_are_values() -> None:
    assert LoadOptions().stop_below == DEFAULT_THRESHOLD
    options = LoadOptions("smollm2", "early-exit:2", tree="2x2")
    assert options == LoadOptions(target="smollm2", draft="early-exit:2", tree="2x2")
    assert dataclasses.replace(options, tree="auto").draft == "early-exit:2"
    for wrong, message in (
        ({"tree": "bush"}, "unknown tree 'bush'"),
        ({"tree": "dynamic:8", "scheme": "naive"}, "dynamic trees draw nothing"),
        ({"tree": "dynamic:8", "walk": "block"}, "dynamic trees draw nothing"),
        ({"scheme": "coupled", "walk": "node"}, "which needs none"),
        ({"scheme": "coupled:3"}, "unknown scheme 'coupled:3'; did you mean 'coupled'"),
        ({"draft_temperature": "warm"}, "draft_temperature='warm' is out of range"),
        ({"stop_below": 2.0}, "decision threshold 2.0"),
        ({"lossy": "all"}, "unknown lossy rule 'all'"),
        ({"lossy": "target-init"}, "grows forks only"),
        ({"drafter": "lookup"}, "uses no draft"),
    ):
        with pytest.raises(UsageError, match=message):
            dataclasses.replace(options, **wrong)
