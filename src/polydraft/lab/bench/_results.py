"""From measurements to `results.json` (docs/bench-results.md)."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.lab.bench import BASELINE
from polydraft.lab.bench._runner import EnergyBlock, Measurement
from polydraft.lab.bench.report import write_report
from polydraft.output import write_text
from polydraft.tune.contest import speedup_interval

_LEAST_PROMPTS = 6
"""With fewer there is no interval: to resample one prompt gives one number, and five may all be faster by chance (one time in
16, in either direction)."""
_PHASES = ("prefill", "draft", "target", "verify", "commit", "total")


def summarise(
    measurements: Iterable[Measurement],
    methods: Sequence[str],
    likeness: dict[tuple[str, str], str] | None,
    energy: Sequence[EnergyBlock] = (),
) -> dict[str, Any]:
    """Return the `methods` part of the results.

    Parameters
    ----------
    measurements : iterable of Measurement
    methods : sequence of str
        In the order of the report.
    likeness : dict, optional
        At temperature 0: (method, prompt) to `Likeness`.
    energy : sequence of EnergyBlock
        Where it was read.
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
    """Return joules per token over all blocks, and those of the thriftiest and the costliest block."""
    each = [block.joules / block.tokens for block in blocks if block.tokens]
    if not each:
        return dict.fromkeys(("joules_per_token", "joules_per_token_low", "joules_per_token_high"))
    mean = sum(block.joules for block in blocks) / sum(block.tokens for block in blocks)
    return {"joules_per_token": mean, "joules_per_token_low": min(each), "joules_per_token_high": max(each)}


def _likelihoods(measurements: Sequence[Measurement], prompts: Sequence[str]) -> list[float | None]:
    """Return the target's mean log-likelihood per token of the texts after each prompt, for differences between methods."""
    found = [_likelihood([one for one in measurements if one.prompt == prompt and one.token_ids]) for prompt in prompts]
    return found if any(value is not None for value in found) else []


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Write `results.json` and `report.html` into a folder that exists."""
    write_text(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False))
    write_report(results, folder / "report.html")


class _Prompt:
    """All repeats of one prompt with one method."""

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
        "acceptance_by_depth": _by_depth(good),
        "winning_branches": _winners(good),
        "block_lengths": _block_lengths(good),
        "tokens_by_source": dict(Counter(source for one in good for source in one.sources).most_common()),
        "seconds": _phases(good),
        "first_token_seconds": statistics.median(firsts) if firsts else None,
        "peak_memory_bytes": max(peaks) if peaks else None,
        "log_likelihood_per_token": _likelihood(good),
        "identical": _count(found, "identical"),
        "near_tie_differences": _count(found, "near-tie"),
        "differences": _count(found, "different"),
        "categories": {
            category: {
                "prompts": len(ones),
                **_speed(ones, baseline),
                **_acceptance([_by_itself(one) for one in good if one.category == category]),
            }
            for category, ones in by_category.items()
        },
    }


def _by_itself(one: Measurement) -> Measurement:
    """Leave out figures that a text shares with others of its batch, which may be of another category."""
    return replace(one, stats=None) if one.stats and one.stats.get("texts", 1) > 1 else one


def _likelihood(good: list[Measurement]) -> float | None:
    """Return the target's mean log-likelihood of the texts, per token."""
    known = [(one.log_likelihood, len(one.token_ids)) for one in good if one.log_likelihood is not None]
    return sum(value for value, _ in known) / sum(count for _, count in known) if known else None


def _count(found: list[str] | None, kind: str) -> int | None:
    return None if not found else found.count(kind)


def _speed(prompts: dict[str, _Prompt], baseline: dict[str, _Prompt]) -> dict[str, float | None]:
    """Return tokens per second, and the speed-up over the baseline with its 95 % interval, resampling prompts in pairs.

    Few prompts have no interval.
    """
    if not prompts:
        return dict.fromkeys(("tokens_per_second", "speedup", "speedup_low", "speedup_high"))
    rate = sum(one.tokens for one in prompts.values()) / sum(one.seconds for one in prompts.values())
    shared = sorted(prompts.keys() & baseline.keys())
    if not shared:
        return {"tokens_per_second": rate, "speedup": None, "speedup_low": None, "speedup_high": None}
    # Columns: tokens and seconds of this method, tokens and seconds of the baseline.
    table = np.array(
        [(prompts[key].tokens, prompts[key].seconds, baseline[key].tokens, baseline[key].seconds) for key in shared]
    )
    ratio, *bounds = speedup_interval(table)
    low, high = bounds if len(shared) >= _LEAST_PROMPTS else (None, None)
    return {"tokens_per_second": rate, "speedup": ratio, "speedup_low": low, "speedup_high": high}


def _acceptance(good: list[Measurement]) -> dict[str, float | None]:
    known = [one for one in good if one.passes is not None]
    passes = sum(max(one.passes) + 1 for one in known if one.passes)
    offers, accepts = _offers(good)
    return {
        "tokens_per_pass": sum(len(one.token_ids) for one in known) / passes if passes else None,
        "acceptance_rate": sum(accepts) / sum(offers) if sum(offers) else None,
        "accepted_share": _accepted_share(good),
    }


def _accepted_share(good: list[Measurement]) -> float | None:
    """Return accepted tokens over lengths of the longest drafted paths; runs of older versions do not tell."""
    told = [one.stats for one in good if one.stats and one.stats.get("path_tokens")]
    return sum(one["accepted_tokens"] for one in told) / sum(one["path_tokens"] for one in told) if told else None


def _winners(good: list[Measurement]) -> list[dict[str, float]]:
    """Return for each child of the root how often its path was accepted, and the mean accepted length then."""
    wins, tokens = Counter[int](), Counter[int]()
    for one in good:
        if one.stats:
            wins.update(dict(enumerate(one.stats.get("wins", ()))))
            tokens.update(dict(enumerate(one.stats.get("win_tokens", ()))))
    total = wins.total()
    return [
        {"share": wins[branch] / total, "accepted": tokens[branch] / wins[branch] if wins[branch] else 0.0}
        for branch in sorted(wins)
        if total
    ]


def _offers(good: list[Measurement]) -> tuple[list[int], list[int]]:
    offers, accepts = Counter[int](), Counter[int]()
    for one in good:
        if one.stats:
            offers.update(dict(enumerate(one.stats["offers"])))
            accepts.update(dict(enumerate(one.stats["accepts"])))
    return [offers[depth] for depth in sorted(offers)], [accepts[depth] for depth in sorted(offers)]


def _by_depth(good: list[Measurement]) -> list[float]:
    return [accepted / offered for offered, accepted in zip(*_offers(good), strict=True) if offered]


def _block_lengths(good: list[Measurement]) -> dict[str, int]:
    lengths = Counter(length for one in good if one.passes is not None for length in Counter(one.passes).values())
    return {str(length): lengths[length] for length in sorted(lengths)}


def _phases(good: list[Measurement]) -> dict[str, float] | None:
    known = [one.stats["seconds"] for one in good if one.stats]
    return {phase: sum(one[phase] for one in known) for phase in _PHASES} if known else None
