"""Estimates of how long training will take, made before it starts, and of the draft's speed-up, made at its end."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from polydraft.devices import captures, wait_for
from polydraft.draft.costs import measured_costs
from polydraft.draft.speedup import speedup
from polydraft.errors import duration
from polydraft.models.loading import Loaded, load_draft
from polydraft.train.corpus import Corpus, check_length, rows_at_a_time
from polydraft.train.pupils import Acceptance
from polydraft.train.settings import TrainSettings
from polydraft.train.start import load_start
from polydraft.train.training import make_optimizers, make_pupil, take_step
from polydraft.train.writer import Texts, Writer, chat_form, enough_memory
from polydraft.trees import parse_tree

_FEW, _MORE = 8, 24
"""Lengths of the two texts that are written to time a token."""
_ROWS_ON_CPU = 2
_LATER = 1.5
"""How much longer an average token takes than the first ones of a text, which are timed."""
_BYTES_PER_TOKEN, _BYTES_PER_WEIGHT = 5, 12
"""Disk space of a token with its answer mark, and of a weight with its optimizer state in float32."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The time and disk space that training takes."""

    writing_seconds: float
    training_seconds: float
    bytes: int

    def __str__(self) -> str:
        total = self.writing_seconds + self.training_seconds
        return (
            f"about {duration(total)} ({duration(self.writing_seconds)} to write the text, "
            f"{duration(self.training_seconds)} to train), and {self.bytes / 1e9:.1f} GB of disk"
        )


def needs_of(settings: TrainSettings, target: Loaded, advance: Callable[[int, int], None] = lambda done, total: None) -> Needs:
    """Time short trials of writing and training, and extrapolate; `advance` is called with trials done and in total."""
    check_length(settings.length, target)
    start = load_start(settings, target)
    trials = 2 if settings.texts else 5
    done, taps = 0, target.model.taps

    def seconds(work: Callable[[], object]) -> float:
        nonlocal done
        wait_for(target.model.device)
        began = time.perf_counter()
        work()
        wait_for(target.model.device)
        took = time.perf_counter() - began
        done += 1
        advance(done, trials)
        return took

    advance(done, trials)
    writing = 0.0 if settings.texts else _writing_seconds(settings, target, seconds)
    rows = settings.batch_size if captures(target.model.device) else min(settings.batch_size, _ROWS_ON_CPU)
    tokens_NL = torch.randint(target.model.vocab_size, (rows + 1, settings.length), generator=torch.Generator().manual_seed(0))
    corpus = Corpus((Texts(tokens_NL.int(), torch.ones(tokens_NL.shape, dtype=torch.bool)),), "chance")
    tried = replace(settings, batch_size=rows)
    pupil = make_pupil(tried, target, corpus, start)
    parameters = list(pupil.module.parameters())
    optimizers = make_optimizers(tried, parameters)
    _, step = (seconds(lambda: take_step(tried, pupil, corpus, 0, optimizers, parameters)) for _ in range(2))
    target.model.tap(taps)
    weights = sum(parameter.numel() for parameter in parameters)
    return Needs(
        writing_seconds=writing,
        training_seconds=step * settings.steps * settings.batch_size / rows,
        bytes=_BYTES_PER_TOKEN * settings.tokens + 2 * _BYTES_PER_WEIGHT * weights,
    )


def _writing_seconds(settings: TrainSettings, target: Loaded, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Estimate how long the target takes to write all texts; `seconds` times a trial."""
    form, device = chat_form(target.tokenizer), target.model.device
    rows = min(rows_at_a_time(settings.length, settings, target), -(-settings.tokens // settings.length))
    writer, generator = Writer(target.model, form, target.eos_token_ids), torch.Generator(device).manual_seed(0)

    def write(length: int) -> None:
        with enough_memory(f"write {rows} texts at a time", "--sampling-rows"):
            writer.write([[0]] * rows, length, False, generator, lambda rows: None)

    # The first run is a warm-up.
    _, few, more = (seconds(partial(write, length)) for length in (_FEW, _FEW, _MORE))
    return max(more - few, 0.0) / ((_MORE - _FEW) * rows) * settings.tokens * _LATER


def forecast_of(folder: str, target: Loaded, acceptance: Sequence[Acceptance], tree: str) -> str:
    """Estimate a draft's speed-up on this machine from its held-out acceptance and the cost of its passes."""
    draft, topology = load_draft(folder, target), parse_tree(tree)
    assert draft is not None
    costs, parts = measured_costs(target.model, draft, topology.num_nodes), []
    for temperature in (0, 1):
        tokens = tokens_per_pass(acceptance, tree, greedy=temperature == 0)
        factor = speedup(tokens, topology.depth, topology.num_nodes, costs)
        parts.append(f"{factor:.2f}× plain decoding at T={temperature} ({tokens:.2f} tokens per pass)")
    return f"expected on this machine, for single texts like the held-out ones, with tree {tree}: {' and '.join(parts)}"


def tokens_per_pass(acceptance: Sequence[Acceptance], tree: str, *, greedy: bool) -> float:
    """Estimate the tokens per target pass, interpolating acceptance by the logarithm of the number of candidates."""
    tokens = reach = 1.0
    for depth, count in enumerate(map(int, tree.split("x"))):
        level = acceptance[min(depth, len(acceptance) - 1)]
        one, four = (level.greedy_1, level.greedy_4) if greedy else (level.sampled_1, level.sampled_4)
        reach *= min(one + (four - one) * math.log2(count) / 2, 1.0)
        tokens += reach
    return tokens
