"""Shards of a benchmark: split its prompts between processes, and join their results."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polydraft.certify.greedy_identity import Likeness
from polydraft.errors import UsageError
from polydraft.lab.bench import BASELINE
from polydraft.lab.bench._results import summarise, write_results
from polydraft.lab.bench._runner import Journal, Measurement, read_measurements
from polydraft.lab.bench.diff import load_results
from polydraft.output import read_settings

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    """Every `count`-th item, starting with the `index`-th, counted from 1.

    In many files the prompts of a category stand together; this way every shard gets some of each.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read ``I/N``, such as ``1/4``."""
        match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
        index, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= index <= count:
            raise UsageError(f"shard {text!r} is out of range; allowed: I/N with I from 1 to N, such as 1/4 for the first of 4")
        return cls(index, count)

    def __str__(self) -> str:
        """Write the shard as users do."""
        return f"{self.index}/{self.count}"

    def select(self, items: Sequence[Item]) -> list[Item]:
        """Return this shard's items; refuse an empty shard."""
        chosen = list(items[self.index - 1 :: self.count])
        if not chosen:
            raise UsageError(f"shard {self} is empty: {len(items)} prompts are selected; use {len(items)} shards at most")
        return chosen

    def place(self, position: int) -> int:
        """Return the position among all items of the item at `position` in this shard, both counted from 0."""
        return position * self.count + self.index - 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """The results of one shard, read from its folder."""

    folder: Path
    shard: Shard
    settings: dict[str, Any]
    """Its options, without the shard."""
    results: dict[str, Any]
    measurements: list[Measurement]

    @classmethod
    def read(cls, folder: Path) -> "Part":
        """Read a finished shard."""
        try:
            settings = read_settings(folder / "settings.json")
            measurements = list(read_measurements(folder / "runs.jsonl"))
        except OSError:
            raise UsageError(
                f"{folder} holds no benchmark; give the folders of `polydraft bench --shard I/N --out DIR`"
            ) from None
        name = settings.pop("shard", None)
        if name is None:
            raise UsageError(f"{folder} is a whole benchmark, not a shard; give the folders of `polydraft bench --shard I/N`")
        shard = Shard.parse(name)
        results = load_results(folder) if (folder / "results.json").exists() else None
        # A later run that added methods or repeats may have been interrupted.
        wanted = (list(dict.fromkeys(settings["methods"])), settings["repeat"])
        if results is None or (list(results["methods"]), results["settings"]["repeat"]) != wanted:
            raise UsageError(f"shard {shard} in {folder} is not finished; finish it with --resume, then merge")
        return cls(folder=folder, shard=shard, settings=settings, results=results, measurements=measurements)

    @property
    def places(self) -> dict[str, int]:
        """Position of each of its prompts among the prompts of all shards."""
        prompts = dict.fromkeys(one.prompt for one in self.measurements)
        return {prompt: self.shard.place(position) for position, prompt in enumerate(prompts)}


def merge_shards(out: Path, folders: Sequence[Path], command: list[str]) -> dict[str, Any]:
    """Join all shards of one benchmark into a new folder, without loading a model, and return the results.

    Figures are computed from the journals; verdicts on greedy texts are copied from the shards' results. The shards may come in
    any order, but must have been started with the same settings on equal machines.
    """
    parts = sorted((Part.read(folder) for folder in folders), key=lambda part: part.shard.index)
    _check(parts)
    places = {prompt: place for part in parts for prompt, place in part.places.items()}
    measurements = sorted(
        (one for part in parts for one in part.measurements), key=lambda one: (one.repeat, places[one.prompt])
    )
    first, count = parts[0], len(parts)
    if (out / "runs.jsonl").exists():
        raise UsageError(f"{out} already holds a benchmark; merge into another folder")
    # "all/N" is not a valid shard, so that this folder can be neither resumed nor merged again.
    journal = Journal(out, {**first.settings, "shard": f"all/{count}"}, resume=False)
    for measurement in measurements:
        journal.add(measurement)
    return write_results(
        out,
        command,
        _revisions(parts),
        machine={**first.results["machine"], "shards_side_by_side": count},
        versions=first.results["versions"],
        settings={**_shared_settings(first), "prompts": _prompts(parts, measurements)},
        methods=summarise(measurements, list(first.results["methods"]), _likeness(parts)),
        differing=[one for part in parts for one in part.results["differing"]],
        trees=first.results["trees"],
        samples=_samples(parts),
    )


def _check(parts: Sequence[Part]) -> None:
    first = parts[0]
    given: dict[Shard, Path] = {}
    for part in parts:
        _check_equal(part.settings, first.settings, part, first)
        _check_equal(_shared_settings(part), _shared_settings(first), part, first)
        for block in ("machine", "versions"):
            _check_equal(part.results[block], first.results[block], part, first)
        if part.shard.count != first.shard.count:
            raise UsageError(f"{part.folder} is shard {part.shard}, {first.folder} is {first.shard}; merge shards of one run")
        if part.shard in given:
            raise UsageError(f"shard {part.shard} is given twice, {given[part.shard]} and {part.folder}; give each once")
        given[part.shard] = part.folder
    missing = [index for index in range(1, first.shard.count + 1) if Shard(index, first.shard.count) not in given]
    if missing:
        raise UsageError(
            f"shard {missing[0]}/{first.shard.count} is missing; give the folders of all {first.shard.count} shards"
        )
    seen: dict[str, Part] = {}
    for part in parts:
        for prompt in part.places:
            other = seen.setdefault(prompt, part)
            if other is not part:
                raise UsageError(f"{other.folder} and {part.folder} both measured prompt {prompt!r}; measure the shards again")


def _check_equal(found: Mapping[str, Any], expected: Mapping[str, Any], part: Part, first: Part) -> None:
    for key in sorted({*found, *expected}):
        if found.get(key) != expected.get(key):
            raise UsageError(
                f"{part.folder} was measured with {key}={found.get(key)!r}, {first.folder} with {expected.get(key)!r}; "
                "merge shards with equal settings, machines and versions only"
            )


def _shared_settings(part: Part) -> dict[str, Any]:
    return {key: value for key, value in part.results["settings"].items() if key not in ("shard", "prompts")}


def _revisions(parts: Iterable[Part]) -> str | None:
    """Return the shards' revision, or several joined by ``+`` if the checkout changed between them."""
    found = dict.fromkeys(part.results["git_revision"] for part in parts if part.results["git_revision"])
    return "+".join(found) or None


def _prompts(parts: Sequence[Part], measurements: Iterable[Measurement]) -> dict[str, Any]:
    blocks = [part.results["settings"]["prompts"] for part in parts]
    categories = dict.fromkeys((one.category for one in measurements), 0)
    for category, count in (item for block in blocks for item in block["categories"].items()):
        categories[category] = categories.get(category, 0) + count
    return {"source": blocks[0]["source"], "count": sum(block["count"] for block in blocks), "categories": categories}


def _likeness(parts: Sequence[Part]) -> dict[tuple[str, str], str] | None:
    """Return the shards' verdicts on how greedy texts compare with the baseline's; None above temperature 0."""
    if parts[0].settings["temperature"] > 0:
        return None
    return dict(pair for part in parts for pair in _likeness_in(part))


def _likeness_in(part: Part) -> Iterator[tuple[tuple[str, str], str]]:
    differing = {(one["method"], one["prompt"]): one["likeness"] for one in part.results["differing"]}
    whole = {(one.method, one.prompt) for one in part.measurements if not one.error}
    for method, prompt in whole:
        compared = part.results["methods"][method]["identical"] is not None  # None for peers with other weights
        if compared and (BASELINE, prompt) in whole:
            yield (method, prompt), differing.get((method, prompt), Likeness.IDENTICAL.value)


def _samples(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the samples of the first prompt of each category over all shards; it is also the first in its own shard."""
    earliest: dict[str, tuple[int, Part]] = {}
    for part in parts:
        places = part.places
        for one in part.measurements:
            found = places[one.prompt], part
            earliest[one.category] = min(earliest.get(one.category, found), found, key=lambda pair: pair[0])
    return [
        sample
        for category, (_, part) in sorted(earliest.items(), key=lambda item: item[1][0])
        for sample in part.results["samples"]
        if sample["category"] == category
    ]
