"""Summarise measurements as `results.json` (docs/bench-results.md)."""

import datetime
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.lab.bench import BASELINE, SCHEMA
from polydraft.lab.bench._runner import EnergyBlock, Measurement
from polydraft.lab.bench.report import write_report
from polydraft.lab.estimate import LEAST_PROMPTS
from polydraft.output import write_text
from polydraft.tune.contest import interval_of, resampled_sums, speedup_interval

_PHASES = ("prefill", "draft", "target", "verify", "commit", "total")


def summarise(
    measurements: Iterable[Measurement],
    methods: Sequence[str],
    likeness: dict[tuple[str, str], str] | None,
    energy: Sequence[EnergyBlock] = (),
) -> dict[str, Any]:
    """Return the `methods` part of the results, in the order of `methods`.

    `likeness` maps a method and a prompt to a `Likeness`; it is None above temperature 0.
    """
    by_method: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_method[measurement.method].append(measurement)
    baseline = _prompts(by_method.get(BASELINE, []))
    prompts = sorted({one.prompt for ones in by_method.values() for one in ones})
    return {
        name: _method(name, by_method.get(name, []), baseline, likeness)
        | _energy([block for block in energy if block.method == name])
        | {"log_likelihood_by_prompt": _likelihoods(by_method.get(name, []), prompts)}
        for name in methods
    }


def _energy(blocks: Sequence[EnergyBlock]) -> dict[str, float | None]:
    """Return joules per token over all blocks, with the lowest and highest block."""
    each = [block.joules / block.tokens for block in blocks if block.tokens]
    if not each:
        return _bounded("joules_per_token")
    mean = sum(block.joules for block in blocks) / sum(block.tokens for block in blocks)
    return _bounded("joules_per_token", mean, min(each), max(each))


def _likelihoods(measurements: Sequence[Measurement], prompts: Sequence[str]) -> list[float | None]:
    """Return the target's mean log-likelihood per token for each prompt, so that methods can be compared prompt by prompt."""
    sums: dict[str, tuple[float, int]] = {}
    for one in measurements:
        if one.log_likelihood is not None and not one.error:
            total, tokens = sums.get(one.prompt, (0.0, 0))
            sums[one.prompt] = total + one.log_likelihood, tokens + len(one.token_ids)
    found = {prompt: total / tokens for prompt, (total, tokens) in sums.items() if tokens}
    return [found.get(prompt) for prompt in prompts] if found else []


def write_results(folder: Path, command: list[str], revision: str | None, **parts: Any) -> dict[str, Any]:
    """Write `results.json` and `report.html` into a folder that exists; return the results."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results = {"schema": SCHEMA, "created": created, "command": command, "git_revision": revision, **parts}
    write_text(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False))
    write_report(results, folder / "report.html")
    return results


class _Prompt:
    """All repeats of one prompt with one method: their mean number of tokens, and the median time for that many."""

    def __init__(self, repeats: list[Measurement]) -> None:
        self.category = repeats[0].category
        self.tokens = statistics.mean(len(one.token_ids) for one in repeats)
        per_token = statistics.median(one.seconds / len(one.token_ids) for one in repeats)
        self.seconds = per_token * self.tokens


def _prompts(measurements: list[Measurement]) -> dict[str, _Prompt]:
    repeats: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if not measurement.error and measurement.token_ids:
            repeats[measurement.prompt].append(measurement)
    return {prompt: _Prompt(ones) for prompt, ones in repeats.items()}


def _method(
    name: str, measurements: list[Measurement], baseline: dict[str, _Prompt], likeness: dict[tuple[str, str], str] | None
) -> dict[str, Any]:
    errors = [measurement.error for measurement in measurements if measurement.error]
    good = [measurement for measurement in measurements if not measurement.error and measurement.token_ids]
    prompts = _prompts(good)
    tokens = sum(len(measurement.token_ids) for measurement in good)
    peaks = [measurement.peak_bytes for measurement in good if measurement.peak_bytes is not None]
    firsts = [one.first_token_seconds for one in good if one.first_token_seconds is not None]
    found = [likeness[name, prompt] for prompt in prompts if (name, prompt) in likeness] if likeness is not None else None
    by_category: dict[str, dict[str, _Prompt]] = defaultdict(dict)
    for prompt, one in prompts.items():
        by_category[one.category][prompt] = one
    return {
        "status": "failed" if errors else "ok",
        "error": errors[0] if errors else None,
        "prompts": len(prompts),
        "tokens": tokens,
        **_speed(prompts, baseline),
        **_acceptance(good),
        **_by_depth(good),
        "winning_branches": _winners(good),
        "block_lengths": _block_lengths(good),
        "tokens_by_source": dict(Counter(source for one in good for source in one.sources).most_common()),
        "seconds": _phases(good),
        "replayed_share": _replayed(good),
        "first_token_seconds": statistics.median(firsts) if firsts else None,
        "peak_memory_bytes": max(peaks) if peaks else None,
        **_ratio("log_likelihood_per_token", ((one.prompt, one.log_likelihood, len(one.token_ids)) for one in good)),
        **_ratio("exact_match", ((one.prompt, one.exact_match, 1) for one in good)),
        "identical": _count(found, "identical"),
        "near_tie_differences": _count(found, "near-tie"),
        "differences": _count(found, "different"),
        "categories": {
            category: {
                "prompts": len(ones),
                **_speed(ones, baseline),
                **_acceptance([one for one in good if one.category == category]),
            }
            for category, ones in by_category.items()
        },
    }


def _count(found: list[str] | None, kind: str) -> int | None:
    return None if not found else found.count(kind)


def _bounded(name: str, value: object = None, low: object = None, high: object = None) -> dict[str, Any]:
    """Return a figure and the ends of its 95 % interval as the three fields of `results.json`."""
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _ratio(name: str, counts: Iterable[tuple[str, float | None, float]]) -> dict[str, Any]:
    """Return a ratio of two sums with its 95 % interval, by a bootstrap over prompts; skip numerators that are None."""
    known = [(prompt, (above, below)) for prompt, above, below in counts if above is not None]
    (bounded,) = _ratios(known, 1) if known else [None]
    return _bounded(name) if bounded is None else _bounded(name, *bounded)


def _ratios(
    counts: Sequence[tuple[str, Sequence[float]]], number: int
) -> list[tuple[float, float | None, float | None] | None]:
    """Return `number` ratios with their 95 % intervals, by a bootstrap over prompts.

    `counts` has a row per text: its prompt, then all numerators and all denominators. A ratio whose denominators are all 0 is
    None. With fewer than `LEAST_PROMPTS` prompts there is no interval.
    """
    sums: dict[str, NDArray[Any]] = {}
    for prompt, row in counts:
        sums[prompt] = sums.get(prompt, 0.0) + np.array(row, dtype=np.float64)
    sums_XF = resampled_sums(np.stack(list(sums.values())))
    found: list[tuple[float, float | None, float | None] | None] = []
    for above_X, below_X in zip(sums_XF.T[:number], sums_XF.T[number:], strict=True):
        if not below_X[0]:
            found.append(None)
            continue
        some_X = below_X > 0  # a resample may miss the few prompts with a denominator above 0
        value, low, high = interval_of(above_X[some_X] / below_X[some_X])
        found.append((value, low, high) if len(sums) >= LEAST_PROMPTS else (value, None, None))
    return found


def _speed(prompts: dict[str, _Prompt], baseline: dict[str, _Prompt]) -> dict[str, float | None]:
    """Return tokens per second and the speed-up over the baseline, with 95 % intervals if there are enough prompts."""
    rate = _ratio("tokens_per_second", ((key, one.tokens, one.seconds) for key, one in prompts.items()))
    shared = sorted(prompts.keys() & baseline.keys())
    if not shared:
        return rate | _bounded("speedup")
    # Columns: tokens and seconds of this method, tokens and seconds of the baseline.
    table = np.array(
        [(prompts[key].tokens, prompts[key].seconds, baseline[key].tokens, baseline[key].seconds) for key in shared]
    )
    ratio, *bounds = speedup_interval(table)
    return rate | _bounded("speedup", ratio, *(bounds if len(shared) >= LEAST_PROMPTS else ()))


def _acceptance(good: list[Measurement]) -> dict[str, Any]:
    """Return tokens per pass and acceptance rates; `accepted_share` is relative to the longest drafted paths."""
    passes = [(one.prompt, len(one.token_ids), max(one.passes) + 1) for one in good if one.passes]
    known = [(one.prompt, one.stats) for one in good if one.stats]
    return {
        **_ratio("tokens_per_pass", passes),
        **_ratio("acceptance_rate", ((prompt, sum(one["accepts"]), sum(one["offers"])) for prompt, one in known)),
        **_ratio("accepted_per_pass", ((prompt, one.get("accepted_tokens"), one["rounds"]) for prompt, one in known)),
        **_ratio("accepted_share", ((prompt, one.get("accepted_tokens"), one.get("path_tokens", 0)) for prompt, one in known)),
    }


def _by_depth(good: list[Measurement]) -> dict[str, Any]:
    """Return α at each depth."""
    name, known = "acceptance_by_depth", [(one.prompt, one.stats) for one in good if one.stats]
    depths = max((len(one["offers"]) for _, one in known), default=0)
    if not depths:
        return _bounded(name, [], [], [])
    counts = [(prompt, [*_padded(one["accepts"], depths), *_padded(one["offers"], depths)]) for prompt, one in known]
    return _bounded(name, *map(list, zip(*(one for one in _ratios(counts, depths) if one), strict=True)))


def _padded(counts: Sequence[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]


def _winners(good: list[Measurement]) -> list[dict[str, Any]]:
    """Return for each child of the root how often its branch won, and the mean accepted length when it did."""
    known = [(one.prompt, one.stats.get("wins", []), one.stats.get("win_tokens", [])) for one in good if one.stats]
    number = max((len(wins) for _, wins, _ in known), default=0)
    if not number:
        return []
    shares = _ratios([(prompt, [*_padded(wins, number), *[sum(wins)] * number]) for prompt, wins, _ in known], number)
    lengths = _ratios([(prompt, [*_padded(tokens, number), *_padded(wins, number)]) for prompt, wins, tokens in known], number)
    pairs = zip(shares, lengths, strict=True)
    return [_bounded("share", *(share or ())) | _bounded("accepted", *(length or (0.0,))) for share, length in pairs]


def _replayed(good: list[Measurement]) -> float | None:
    """Return the share of rounds replayed from captures; compare speeds only between runs with similar shares."""
    known = [one.stats for one in good if one.stats and one.stats.get("rounds")]
    return sum(one.get("replayed_rounds", 0) for one in known) / sum(one["rounds"] for one in known) if known else None


def _block_lengths(good: list[Measurement]) -> dict[str, int]:
    lengths = Counter(length for one in good if one.passes is not None for length in Counter(one.passes).values())
    return {str(length): lengths[length] for length in sorted(lengths)}


def _phases(good: list[Measurement]) -> dict[str, float] | None:
    known = [one.stats["seconds"] for one in good if one.stats]
    return {phase: sum(one[phase] for one in known) for phase in _PHASES} if known else None
