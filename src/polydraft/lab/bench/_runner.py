"""Measure methods against each other, interleaved prompt by prompt in one process, and keep the measurements."""

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
from polydraft.output import cannot_write, check_folder, keep_settings
from polydraft.prompts import Prompt

_WARM_UP_TOKENS = 8
_WARM_UPS_OF_GPUS = 2
"""Whole texts: a kind of round is captured when it occurs for the second time."""
_BLOCKS = 3
"""Readings of a method's energy; their spread shows which differences matter."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one method did with one prompt, once."""

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
    """The engine's own figures, where it has some."""
    first_token_seconds: float | None = None
    peak_bytes: int | None = None
    error: str | None = None
    log_likelihood: float | None = None
    """The target's log-probability of the text, if it was computed."""
    exact_match: bool | None = None
    """Whether the text is the prompt's answer, where it has one."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Method, prompt and repeat, which identify it."""
        return self.method, self.prompt, self.repeat


@dataclass(frozen=True, kw_only=True)
class EnergyBlock:
    """The energy of one method over some seconds; energy counters are too coarse for single texts."""

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
    """Read a file of JSON lines, without lines that a kill cut off and fields that no longer exist."""
    known = kind.__dataclass_fields__
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield kind(**{name: value for name, value in json.loads(line).items() if name in known})
        except (json.JSONDecodeError, AttributeError, TypeError):
            continue


class Journal:
    """Measurements on disk, one JSON line each, written at once, so that a killed run leaves whole lines.

    To resume, the settings must be the same; otherwise a folder that holds a benchmark is refused.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], resume: bool) -> None:
        self._path, self._energy_path = folder / "runs.jsonl", folder / "energy.jsonl"
        try:
            check_folder(folder, resume=resume)
            folder.mkdir(parents=True, exist_ok=True)
            # More methods or repeats may be added; anything else would mix what cannot be compared.
            keep_settings(folder / "settings.json", settings, folder, resume=resume, free={"methods", "repeat"})
            self._path.touch()
            for path in (self._path, self._energy_path):
                if path.exists() and (written := path.read_bytes()) and not written.endswith(b"\n"):
                    _append(path, "\n")  # a kill cut the last line off: begin a new one
        except OSError as error:
            raise cannot_write(folder, error) from None

    def __iter__(self) -> Iterator[Measurement]:
        """Read what is there."""
        return read_measurements(self._path)

    def blocks(self) -> list[EnergyBlock]:
        """Read what is there of energy."""
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
    """Runs every method on every prompt, `repeat` times, and writes each measurement at once.

    For each prompt the methods run one after the other, starting with another one each time, so that a slow minute of a shared
    machine affects all alike. With a batch above 1, methods that can decode several texts at a time do so, one method after the
    other: that is for counting acceptance, not for timing.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        prompts: Sequence[tuple[Prompt, list[int]]],
        *,
        repeat: int,
        seed: int,
        device: torch.device,
        batch: int = 1,
        energy_seconds: float = 0.0,
        energy: EnergyMeter | None = None,
        likelihood: Callable[[list[int], list[int]], float] | None = None,
        grade: Callable[[Prompt, list[int]], bool | None] = lambda prompt, tokens: None,
    ) -> None:
        self.methods, self.prompts, self.repeat, self.seed = list(methods), list(prompts), repeat, seed
        self._batch = batch
        self._device = device
        self._likelihood, self._grade = likelihood, grade
        self._memory = MemoryMeter(device)
        self._energy, self._energy_seconds = energy, energy_seconds

    @property
    def total(self) -> int:
        """Measurements of a complete run."""
        return len(self.methods) * len(self.prompts) * self.repeat

    def run(self, journal: Journal, progress: Callable[[Measurement | None], None]) -> None:
        """Measure what the journal does not hold yet; call `progress` with every measurement, or None for one that is there."""
        done = {measurement.key: measurement for measurement in journal}
        failed = {measurement.method for measurement in done.values() if measurement.error}
        warm: set[str] = set()
        if self._batch > 1:
            self._run_batches(journal, progress, done.keys(), failed)
            return
        for repeat, index, method in self._schedule():
            prompt, token_ids = self.prompts[index]
            if (method.name, prompt.id, repeat) in done or method.name in failed:
                progress(None)
                continue
            if method.name not in warm:
                self._warm_up(method, token_ids)
                warm.add(method.name)
            measurement = self._measure(method, prompt, token_ids, repeat)
            journal.add(measurement)
            if measurement.error:
                failed.add(method.name)
            progress(measurement)
        self._measure_energy(journal, failed, warm)

    def _measure_energy(self, journal: Journal, failed: set[str], warm: set[str]) -> None:
        """Read the energy of every method over blocks of some seconds, in turns."""
        meter = self._energy
        if meter is None or not self._energy_seconds or meter.joules() is None:
            return
        done = {(one.method, one.block) for one in journal.blocks()}
        for block, method in itertools.product(range(_BLOCKS), self.methods):
            if (method.name, block) in done or method.name in failed:
                continue
            if method.name not in warm:
                self._warm_up(method, self.prompts[0][1])
                warm.add(method.name)
            try:
                journal.add(self._energy_block(method, block, meter))
            except PolydraftError:
                raise
            except Exception:  # of a peer; what was measured of its texts stands
                failed.add(method.name)

    def _energy_block(self, method: Method, block: int, meter: EnergyMeter) -> EnergyBlock:
        """Decode all prompts repeatedly until enough time has passed."""
        before, start, tokens = meter.joules(), synchronised_clock(self._device), 0
        for number in itertools.count():
            _, token_ids = self.prompts[number % len(self.prompts)]
            tokens += sum(1 for _ in method.generate(token_ids, self.seed + block))
            seconds = synchronised_clock(self._device) - start
            # Whole rounds of the prompts: every method and block then decodes the same ones.
            if seconds >= self._energy_seconds and (number + 1) % len(self.prompts) == 0:
                break
        after = meter.joules()
        assert before is not None and after is not None, "the counter could be read before"
        return EnergyBlock(method=method.name, block=block, tokens=tokens, seconds=seconds, joules=after - before)

    def _run_batches(
        self,
        journal: Journal,
        progress: Callable[[Measurement | None], None],
        done: Collection[tuple[str, str, int]],
        failed: set[str],
    ) -> None:
        for repeat, method in itertools.product(range(self.repeat), self.methods):
            missing = [pair for pair in self.prompts if (method.name, pair[0].id, repeat) not in done]
            for _ in range(len(self.prompts) - len(missing)):
                progress(None)
            size = self._batch if method.generate_batch is not None else 1
            for pairs in (missing[start : start + size] for start in range(0, len(missing), size)):
                found = [] if method.name in failed else self._measure_batch(method, pairs, repeat)
                for measurement in found:
                    journal.add(measurement)
                    if measurement.error:
                        failed.add(method.name)
                for number in range(len(pairs)):
                    progress(found[number] if number < len(found) else None)

    def _measure_batch(self, method: Method, pairs: Sequence[tuple[Prompt, list[int]]], repeat: int) -> list[Measurement]:
        """Decode some prompts at a time; the first measurement holds the time of all."""
        if method.generate_batch is None:
            return [self._measure(method, *pair, repeat) for pair in pairs]
        start = synchronised_clock(self._device)
        texts: list[list[Token]] = []
        stats: Sequence[Stats | None] = [None]
        error: str | None = None
        try:
            texts, stats = method.generate_batch([token_ids for _, token_ids in pairs], self.seed + repeat)
        except Exception as problem:  # as for single texts
            error = _one_line(problem)
        seconds = (synchronised_clock(self._device) - start) / len(pairs)
        if error is not None:
            texts = [[]]
        return [
            self._measurement(
                method,
                pair,
                tokens,
                repeat=repeat,
                seconds=seconds,
                stats=_figures(counted) if counted is not None else None,
                error=error,
            )
            for pair, tokens, counted in zip(pairs, texts, stats, strict=error is None)
        ]

    def _schedule(self) -> Iterator[tuple[int, int, Method]]:
        for repeat in range(self.repeat):
            for index in range(len(self.prompts)):
                turn = (index + repeat) % len(self.methods)
                for method in self.methods[turn:] + self.methods[:turn]:
                    yield repeat, index, method

    def _warm_up(self, method: Method, token_ids: list[int]) -> None:
        """Let a method load, compile and allocate before it is timed; a failure shows in its first measurement."""
        on_gpu = captures(self._device)
        try:
            if method.warm_up is not None and on_gpu:
                method.warm_up()
            for _ in range(_WARM_UPS_OF_GPUS if on_gpu else 1):
                for count, _ in enumerate(method.generate(token_ids, self.seed), start=1):
                    if count >= _WARM_UP_TOKENS and not on_gpu:
                        break
        except Exception:  # of whatever kind, as in a measurement
            return

    def _measure(self, method: Method, prompt: Prompt, token_ids: list[int], repeat: int) -> Measurement:
        tokens: list[Token] = []
        first: float | None = None
        stats: Stats | None = None
        error: str | None = None
        self._memory.start()
        start = synchronised_clock(self._device)
        try:
            # The same seed in every arm; repeats differ.
            stream = method.generate(token_ids, self.seed + repeat)
            while True:
                try:
                    tokens.append(next(stream))
                except StopIteration as end:
                    stats = end.value
                    break
                if first is None:
                    first = synchronised_clock(self._device) - start
        except Exception as problem:  # any failure of a peer is a result, and the other arms continue
            error = _one_line(problem)
        seconds = synchronised_clock(self._device) - start
        return self._measurement(
            method,
            (prompt, token_ids),
            tokens,
            repeat=repeat,
            seconds=seconds,
            first_token_seconds=first if stats is not None else None,
            stats=_figures(stats) if stats else None,
            peak_bytes=self._memory.peak(),
            error=error,
        )

    def _measurement(
        self, method: Method, pair: tuple[Prompt, list[int]], tokens: Sequence[Token], *, error: str | None, **figures: Any
    ) -> Measurement:
        """Return the measurement of one text, scored by the target if the runner has a likelihood."""
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
            error=error,
            log_likelihood=self._likelihood(prompt_ids, token_ids) if self._likelihood and tokens and error is None else None,
            exact_match=self._grade(prompt, token_ids) if error is None else None,
            **figures,
        )


def _figures(stats: Stats) -> dict[str, Any]:
    """Return the engine's figures, with the counts that summaries over many texts add up."""
    return stats.as_dict() | {
        "offers": stats.offers_by_depth,
        "accepts": stats.accepts_by_depth,
        "path_tokens": stats.path_tokens,
        "accepted_tokens": stats.block_tokens - stats.passes,
        "wins": stats.wins_by_branch,
        "win_tokens": stats.accepts_by_branch,
    }


def _one_line(problem: Exception) -> str:
    said = " ".join(str(problem).split())
    # Our own messages are complete; others often mean little without their type.
    return said if isinstance(problem, PolydraftError) else f"{type(problem).__name__}: {said}"[:400]
