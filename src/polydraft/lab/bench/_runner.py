"""Run methods in turns, prompt by prompt in one process, and record each measurement on disk at once."""

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from polydraft.devices import captures
from polydraft.engine import Stats
from polydraft.errors import FailureError, PolydraftError
from polydraft.lab.bench.meters import EnergyMeter, MemoryMeter, synchronised_clock
from polydraft.lab.bench.method import Method, Token
from polydraft.lab.bench.options import BenchOptions
from polydraft.output import cannot_write, check_folder, keep_settings
from polydraft.prompts import Prompt

_WARM_UP_TOKENS = 8
_WARM_UPS_OF_GPUS = 2
"""Whole texts, because a round is captured the second time its kind occurs."""
_BLOCKS = 3
"""Energy readings per method; their spread shows which differences matter."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of running one method on one prompt, once."""

    method: str
    prompt: str
    """Id of the prompt."""
    category: str
    repeat: int
    seconds: float
    token_ids: list[int]
    sources: list[str]
    passes: list[int] | None
    """Target pass of each token; None where unknown."""
    stats: dict[str, Any] | None
    """The engine's own figures; None for peers."""
    first_token_seconds: float | None = None
    peak_bytes: int | None = None
    error: str | None = None
    log_likelihood: float | None = None
    """The target's log-probability of the text, if asked for."""
    exact_match: bool | None = None
    """Whether the text is the prompt's answer; None if the prompt has none."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Method, prompt and repeat: unique in a benchmark."""
        return self.method, self.prompt, self.repeat


@dataclass(frozen=True, kw_only=True)
class EnergyBlock:
    """The energy that one method used over some seconds; counters are too coarse for single texts."""

    method: str
    block: int
    tokens: int
    seconds: float
    joules: float


Record = TypeVar("Record", Measurement, EnergyBlock)


def read_measurements(path: Path) -> Iterator[Measurement]:
    """Read a `runs.jsonl`."""
    return _records(path, Measurement)


def _records(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Read a file of JSON lines; skip lines that a kill cut off, and fields that no longer exist."""
    known = kind.__dataclass_fields__
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # `splitlines` also cuts at U+2028
        try:
            yield kind(**{name: value for name, value in json.loads(line).items() if name in known})
        except (json.JSONDecodeError, AttributeError, TypeError):
            continue


class Journal:
    """Measurements on disk, one JSON line each, written as they are made, so that a killed run can be resumed.

    A folder that already holds a benchmark is refused, unless the run resumes it with the same settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], resume: bool) -> None:
        self._path, self._energy_path = folder / "runs.jsonl", folder / "energy.jsonl"
        try:
            check_folder(folder, resume=resume)
            folder.mkdir(parents=True, exist_ok=True)
            # A resumed run may add methods or repeats; other changes would make the measurements incomparable.
            keep_settings(folder / "settings.json", settings, folder, resume=resume, free={"methods", "repeat"})
            self._path.touch()
            for path in (self._path, self._energy_path):
                if path.exists() and (written := path.read_bytes()) and not written.endswith(b"\n"):
                    _append(path, "\n")  # a kill cut the last line off
        except OSError as error:
            raise cannot_write(folder, error) from None

    def __iter__(self) -> Iterator[Measurement]:
        """Read the measurements made so far."""
        return read_measurements(self._path)

    def blocks(self) -> list[EnergyBlock]:
        """Read the energy blocks measured so far."""
        return list(_records(self._energy_path, EnergyBlock)) if self._energy_path.exists() else []

    def add(self, record: Measurement | EnergyBlock) -> None:
        """Append one measurement."""
        path = self._path if isinstance(record, Measurement) else self._energy_path
        try:
            _append(path, json.dumps(asdict(record)) + "\n")
        except OSError as error:
            raise FailureError(f"cannot write to {path} ({error.strerror}); what was measured so far is kept") from None


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


class Runner:
    """Runs every method on every prompt, `repeat` times.

    Methods take turns on each prompt, and the one that starts rotates, so that a slow minute of a shared machine hits all of
    them alike. With a batch above 1, methods run one after the other and decode several texts at a time where they can: that
    counts acceptance, but its timings mean little.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        prompts: Sequence[tuple[Prompt, list[int]]],
        options: BenchOptions,
        device: torch.device,
        *,
        likelihood: Callable[[list[int], list[int]], float] | None,
        grade: Callable[[Prompt, list[int]], bool | None],
    ) -> None:
        self.methods, self.prompts, self.repeat, self.seed = list(methods), list(prompts), options.repeat, options.seed
        self._device, self._batch, self._energy_seconds = device, options.batch, options.energy_seconds
        self._likelihood, self._grade = likelihood, grade
        self._memory, self._energy = MemoryMeter(device), EnergyMeter(device)
        self._warm: set[str] = set()
        """Methods that are warmed up."""
        self._failed: set[str] = set()
        """Methods that raised an error; they are not run again."""

    @property
    def total(self) -> int:
        """Number of measurements in a complete run."""
        return len(self.methods) * len(self.prompts) * self.repeat

    def run(self, journal: Journal, progress: Callable[[Measurement | None], None]) -> None:
        """Make the measurements missing from the journal; call `progress` with each, and with None for each skipped one."""
        measurements = list(journal)
        done = {measurement.key for measurement in measurements}
        self._failed = {measurement.method for measurement in measurements if measurement.error}
        if self._batch > 1:
            self._run_batches(journal, progress, done)
            return
        for repeat, index, method in self._schedule():
            prompt, token_ids = self.prompts[index]
            if (method.name, prompt.id, repeat) in done or method.name in self._failed:
                progress(None)
                continue
            self._warm_up(method, token_ids)
            measurement = self._measure(method, prompt, token_ids, repeat)
            self._add(journal, measurement)
            progress(measurement)
        self._measure_energy(journal)

    def _add(self, journal: Journal, measurement: Measurement) -> None:
        journal.add(measurement)
        if measurement.error:
            self._failed.add(measurement.method)

    def _measure_energy(self, journal: Journal) -> None:
        """Read the energy of every method over blocks of some seconds; methods take turns."""
        if not self._energy_seconds or self._energy.joules() is None:
            return
        done = {(one.method, one.block) for one in journal.blocks()}
        for block, method in itertools.product(range(_BLOCKS), self.methods):
            if (method.name, block) in done or method.name in self._failed:
                continue
            self._warm_up(method, self.prompts[0][1])
            try:
                journal.add(self._energy_block(method, block))
            except PolydraftError:
                raise
            except Exception:  # a peer failed; its texts' measurements stand
                self._failed.add(method.name)

    def _energy_block(self, method: Method, block: int) -> EnergyBlock:
        """Decode all prompts over and over until enough time has passed."""
        before, start, tokens = self._energy.joules(), synchronised_clock(self._device), 0
        for number in itertools.count():
            _, token_ids = self.prompts[number % len(self.prompts)]
            tokens += sum(1 for _ in method.generate(token_ids, self.seed + block))
            seconds = synchronised_clock(self._device) - start
            # Only stop after the last prompt, so that every method and block decodes the same ones.
            if seconds >= self._energy_seconds and (number + 1) % len(self.prompts) == 0:
                break
        after = self._energy.joules()
        assert before is not None and after is not None, "the caller has read this counter"
        return EnergyBlock(method=method.name, block=block, tokens=tokens, seconds=seconds, joules=after - before)

    def _run_batches(
        self,
        journal: Journal,
        progress: Callable[[Measurement | None], None],
        done: Collection[tuple[str, str, int]],
    ) -> None:
        for repeat, method in itertools.product(range(self.repeat), self.methods):
            missing = [pair for pair in self.prompts if (method.name, pair[0].id, repeat) not in done]
            for _ in range(len(self.prompts) - len(missing)):
                progress(None)
            size = self._batch if method.generate_batch is not None else 1
            for pairs in (missing[start : start + size] for start in range(0, len(missing), size)):
                found = [] if method.name in self._failed else self._measure_batch(method, pairs, repeat)
                for measurement in found:
                    self._add(journal, measurement)
                for _, result in itertools.zip_longest(pairs, found):
                    progress(result)

    def _measure_batch(self, method: Method, pairs: Sequence[tuple[Prompt, list[int]]], repeat: int) -> list[Measurement]:
        """Decode some prompts at a time; a failure yields one measurement."""
        if method.generate_batch is None:
            return [self._measure(method, *pair, repeat) for pair in pairs]
        start = synchronised_clock(self._device)
        texts: list[list[Token]] = [[]]
        stats: Sequence[Stats | None] = [None]
        error: str | None = None
        try:
            texts, stats = method.generate_batch([token_ids for _, token_ids in pairs], self.seed + repeat)
        except Exception as problem:  # as for single texts
            error = _one_line(problem)
        seconds = (synchronised_clock(self._device) - start) / len(pairs)
        return [
            self._measurement(method, pair, tokens, repeat=repeat, seconds=seconds, stats=counted, error=error)
            for pair, tokens, counted in zip(pairs, texts, stats, strict=error is None)
        ]

    def _schedule(self) -> Iterator[tuple[int, int, Method]]:
        for repeat in range(self.repeat):
            for index in range(len(self.prompts)):
                turn = (index + repeat) % len(self.methods)
                for method in self.methods[turn:] + self.methods[:turn]:
                    yield repeat, index, method

    def _warm_up(self, method: Method, token_ids: list[int]) -> None:
        """Let a method load, compile and allocate before its first timing; failures show in that first measurement."""
        if method.name in self._warm:
            return
        self._warm.add(method.name)
        on_gpu = captures(self._device)
        try:
            if method.warm_up is not None and on_gpu:
                method.warm_up()
            for _ in range(_WARM_UPS_OF_GPUS if on_gpu else 1):
                for count, _ in enumerate(method.generate(token_ids, self.seed), start=1):
                    if count >= _WARM_UP_TOKENS and not on_gpu:
                        break
        except Exception:  # of any kind, as in a measurement
            return

    def _measure(self, method: Method, prompt: Prompt, token_ids: list[int], repeat: int) -> Measurement:
        tokens: list[Token] = []
        first: float | None = None
        stats: Stats | None = None
        error: str | None = None
        self._memory.start()
        start = synchronised_clock(self._device)
        try:
            # Every method gets the same seed; repeats differ.
            stream = method.generate(token_ids, self.seed + repeat)
            while True:
                try:
                    tokens.append(next(stream))
                except StopIteration as end:
                    stats = end.value
                    break
                if first is None:
                    first = synchronised_clock(self._device) - start
        except Exception as problem:  # any failure of a peer is a result; the other methods continue
            error = _one_line(problem)
        seconds = synchronised_clock(self._device) - start
        return self._measurement(
            method,
            (prompt, token_ids),
            tokens,
            repeat=repeat,
            seconds=seconds,
            first_token_seconds=first if stats is not None else None,
            stats=stats,
            peak_bytes=self._memory.peak(),
            error=error,
        )

    def _measurement(
        self,
        method: Method,
        pair: tuple[Prompt, list[int]],
        tokens: Sequence[Token],
        *,
        stats: Stats | None,
        error: str | None,
        **figures: Any,
    ) -> Measurement:
        """Return the measurement of one text, with its likelihood and grade if the runner computes them."""
        prompt, prompt_ids = pair
        token_ids = [token.token_id for token in tokens]
        passes = [token.target_pass for token in tokens if token.target_pass is not None]
        return Measurement(
            method=method.name,
            prompt=prompt.id,
            category=prompt.category,
            token_ids=token_ids,
            sources=[token.source for token in tokens],
            passes=passes if tokens and len(passes) == len(tokens) else None,
            stats=_figures(stats) if stats is not None else None,
            error=error,
            log_likelihood=self._likelihood(prompt_ids, token_ids) if self._likelihood and tokens and error is None else None,
            exact_match=self._grade(prompt, token_ids) if error is None else None,
            **figures,
        )


def _figures(stats: Stats) -> dict[str, Any]:
    """Return the engine's figures, with the counts that summaries add up over many texts."""
    return stats.as_dict() | {
        "offers": stats.offers_by_depth,
        "accepts": stats.accepts_by_depth,
        "path_tokens": stats.path_tokens,
        "accepted_tokens": stats.block_tokens - stats.passes,
        "wins": stats.wins_by_branch,
        "win_tokens": stats.accepts_by_branch,
    }


def _one_line(problem: Exception) -> str:
    message = " ".join(str(problem).split())
    # Our own messages are complete; other exceptions often mean little without their type.
    return message if isinstance(problem, PolydraftError) else f"{type(problem).__name__}: {message}"[:400]
