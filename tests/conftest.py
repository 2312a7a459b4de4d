"""Settings for all tests, and a tiny model on disk, with a tokenizer and a chat template, for commands to load."""

import gc
import os

# Before anything imports the hub's client: no test may depend on, or wait for, the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor on what somebody has tuned on this machine.
os.environ["POLYDRAFT_PROFILE"] = "none"

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import interpreted
from families import FAMILIES
from polydraft.backends.triton import interpreting
from polydraft.cli.main import run
from polydraft.devices import values_hidden
from polydraft.draft.policy import RowPolicy
from polydraft.engine.workspace import Workspace
from polydraft.models import placement
from polydraft.registry import Registry
from stand_in import StandIn, round_graphs

# Test tensors are small: threads cost more than they give, and pytest-xdist already fills the cores.
torch.set_num_threads(1)
interpreted.turn_on()  # before anything imports Triton
# "auto" is float32 on every CPU under test: in bfloat16, which some would choose, texts of random weights are full of ties.
placement.cpu_computes_bfloat16 = lambda: False
# What is imported and collected stays to the end: to look through it again and again takes a sixth of the tests' time.
gc.disable()


@pytest.fixture
def as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every row draft as if no others shared its rounds: a batch then stands for as many single texts."""
    monkeypatch.setattr(RowPolicy, "share", lambda policy, loads: None)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Commands under test may set their own number of threads, which would stay for all tests after them."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def hide_values() -> Iterator[Callable[[], None]]:
    """Return a function after which, to the end of the test, the host may not look at values, as on a GPU."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(values_hidden())


@pytest.fixture
def registered() -> Iterator[Callable[[Registry[Any], str, Any], None]]:
    """Return a function that registers something to the end of the test."""
    with ExitStack() as stack:
        yield lambda registry, name, item: stack.enter_context(registry.holding(name, item))


@pytest.fixture
def interpret() -> Iterator[Callable[[bool], None]]:
    """Return a function that says whether, to the end of the test, kernels run in Triton's interpreter."""
    with ExitStack() as stack:
        yield lambda on: stack.enter_context(interpreting(on))


def pytest_collection_finish() -> None:
    """Look from here on only at what tests make."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names no case by raw bytes: packed ones may carry the time, and every worker must collect the same names."""
    return argname if isinstance(val, bytes) else None


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, an end-of-text token, and some unused ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    vocabulary["<end>"] = len(vocabulary)
    for number in range(extra):
        vocabulary[f"<extra{number}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)


def save(folder: Path, *, seed: int = 0, extra: int = 0, broken: bool = False, positions: int = 128) -> str:
    tokenizer = byte_tokenizer(extra)
    options = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": positions}
    model = FAMILIES.get("llama").build(seed=seed, **options)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    if broken:
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("roomy"), positions=1024)


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("broken"), broken=True)


@pytest.fixture(scope="session")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("other"), extra=3)


@pytest.fixture(scope="session")
def unlike_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are words that no other tokenizer here has."""
    folder = save(tmp_path_factory.mktemp("unlike"))
    size = len(byte_tokenizer())
    tokenizer = Tokenizer(models.BPE(vocab={f"word{number}": number for number in range(size)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def renumbered(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> str:
    """The tiny model with its tokens in the opposite order, but for the end of text, which is first."""
    folder = tmp_path_factory.mktemp("renumbered")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table.copy_(table.flip(0).clone())
    tokenizer = byte_tokenizer()
    numbers = {token: len(tokenizer) - 1 - number for token, number in tokenizer.get_vocab().items()}
    state = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    state.pre_tokenizer, state.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.config.eos_token_id = model.generation_config.eos_token_id = numbers["<end>"]
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=state, eos_token="<end>").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]):
    """Run a command in this process; return its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Let the workspaces of decoders with `graphs` capture; return their caches."""
    made: list[StandIn] = []
    original = Workspace.__init__

    def with_graphs(workspace: Workspace, target: Any, drafter: Any, params: Any, graphs: bool, *others: Any) -> None:
        original(workspace, target, drafter, params, graphs, *others)
        if graphs:
            workspace.launcher.graphs = round_graphs(workspace)
            made.append(workspace.launcher.graphs)

    monkeypatch.setattr(Workspace, "__init__", with_graphs)
    return made
