"""A made-up results.json with everything that can be in one: a peer that tells little, a method that failed midway."""

from typing import Any

TEXT = {
    "coding": ("Write a function that reverses a list.", "def| reverse|(|items|):|\n|   | return| items|[::-|1|]|\n|<end>"),
    "writing": (
        "Describe the sea in two sentences.",
        "The| sea| is| a| wide| grey| field| that| never| sleeps|.| It| breathes|.",
    ),
    "reasoning": ("If 3 < x and x & 1 = 0, what is the least x?", "The| least| even| number| above| 3| is| 4|,| so| x| =| 4|."),
}
SPEEDS = {"coding": 1.12, "writing": 0.9, "reasoning": 1.0}


def _seconds(total: float, draft: float) -> dict[str, float]:
    """Split the time of all generations, `draft` being the share of drafting."""
    shares = {"prefill": 0.06, "draft": draft, "target": 0.85 - draft, "verify": 0.05, "commit": 0.02, "total": 1.0}
    return {name: share * total for name, share in shares.items()}


def _method(speedup: float, **given: Any) -> dict[str, Any]:
    """Figures of a method that ran to the end."""
    half = 0.06
    figures: dict[str, Any] = {
        "status": "ok",
        "error": None,
        "prompts": 30,
        "tokens": 1890,
        "tokens_per_second": 23.4 * speedup,
        "speedup": speedup,
        "speedup_low": speedup - half,
        "speedup_high": speedup + half,
        "tokens_per_pass": 2.1,
        "acceptance_rate": 0.41,
        "acceptance_by_depth": [0.62, 0.48, 0.37],
        "block_lengths": {"1": 330, "2": 270, "3": 180, "4": 120},
        "seconds": _seconds(80.8 / speedup, draft=0.16),
        "first_token_seconds": 0.21,
        "peak_memory_bytes": 1_430_000_000,
        "joules_per_token": None,
        "identical": 30,
        "near_tie_differences": 0,
        "differences": 0,
    }
    figures.update(given)
    figures["categories"] = {
        name: {
            "prompts": 10,
            "tokens_per_second": figures["tokens_per_second"] * factor,
            "speedup": speedup * factor,
            "speedup_low": speedup * factor - 2 * half,
            "speedup_high": speedup * factor + 2 * half,
            "tokens_per_pass": figures["tokens_per_pass"] and figures["tokens_per_pass"] * factor,
            "acceptance_rate": figures["acceptance_rate"] and figures["acceptance_rate"] * factor,
        }
        for name, factor in SPEEDS.items()
    }
    return figures


def _baseline() -> dict[str, Any]:
    figures = _method(
        1.0,
        speedup_low=1.0,
        speedup_high=1.0,
        tokens_per_pass=1.0,
        acceptance_rate=None,
        acceptance_by_depth=[],
        block_lengths={"1": 1890},
        seconds=_seconds(80.8, draft=0.0),
    )
    for part in figures["categories"].values():
        part.update(speedup=1.0, speedup_low=1.0, speedup_high=1.0)
    return figures


def _failed() -> dict[str, Any]:
    nothing = dict.fromkeys(_method(1.0))
    empty = {"acceptance_by_depth": [], "block_lengths": {}, "categories": {}, "prompts": 0, "tokens": 0}
    return {
        **nothing,
        **empty,
        "status": "failed",
        "error": "a tree of 2,048 nodes is too large; allowed: at most 1024 with the root",
    }


def _sample(method: str, category: str, pattern: list[tuple[str, int]]) -> dict[str, Any]:
    """Tokens whose sources repeat a pattern of (source, tokens)."""
    prompt, text = TEXT[category]
    tokens, turn = [], 0
    pieces = text.split("|")
    while len(tokens) < len(pieces):
        source, count = pattern[turn % len(pattern)]
        for place in range(count):
            if len(tokens) < len(pieces):
                said = source if place < count - 1 else "target"
                tokens.append({"text": pieces[len(tokens)], "source": said, "pass": turn})
        turn += 1
    return {"method": method, "category": category, "prompt": prompt, "tokens": tokens}


def sample_results() -> dict[str, Any]:
    """Return fresh results; a test may change them."""
    peer = dict.fromkeys(("tokens_per_pass", "acceptance_rate", "seconds", "first_token_seconds"))
    chain: dict[str, Any] = {
        "speedup_low": 0.97,
        "speedup_high": 1.09,
        "tokens_per_pass": 1.7,
        "acceptance_by_depth": [0.55, 0.42, 0.3, 0.22],
    }
    chain["block_lengths"] = {"1": 600, "2": 330, "3": 120, "4": 40, "5": 22}
    wide = {
        "acceptance_rate": 0.47,
        "acceptance_by_depth": [0.81, 0.66, 0.57, 0.41, 0.32],
        "block_lengths": {"1": 150, "2": 170, "3": 160, "4": 130, "5": 60, "6": 45},
        "tokens_per_pass": 2.64,
        "seconds": _seconds(80.8 / 1.31, draft=0.22),
        "identical": 29,
        "near_tie_differences": 1,
    }
    methods = {
        "ar": _baseline(),
        "chain:4": _method(1.03, **chain),
        "mcsd:4x2x2x1x1": _method(1.31, **wide),
        "auto": _method(1.24, tokens_per_pass=2.3, acceptance_rate=0.44),
        "ngram+model:4x2x1": _method(0.86, tokens_per_pass=1.9, seconds=None, joules_per_token=1.37),
        "hf-assisted": _method(0.88, **peer, acceptance_by_depth=[], block_lengths={}, peak_memory_bytes=None),
        "mcsd:2x2x2x2x2x2x2x2x2x2": _failed(),
    }
    patterns = {
        "ar": [("target", 1)],
        "mcsd:4x2x2x1x1": [("model", 4), ("model", 1), ("model", 2)],
        "ngram+model:4x2x1": [("ngram", 3), ("model", 2), ("target", 1)],
    }
    return {
        "schema": 1,
        "created": "2026-11-15T04:00:00+00:00",
        "command": [
            "polydraft",
            "bench",
            "--target",
            "smollm2",
            "--methods",
            "ar,chain:4,mcsd:4x2x2x1x1",
            "--out",
            "results/my run",
        ],
        "git_revision": "c0f4f7e",
        "machine": {"cpu": "AMD EPYC 7B13", "cores": 2, "memory_bytes": 8_345_000_000, "gpu": None, "threads": 2},
        "versions": {"polydraft": "0.1.0", "python": "3.11.9", "torch": "2.6.0", "transformers": "5.0.1"},
        "settings": {
            "target": "smollm2",
            "draft": "early-exit:2",
            "dtype": "float32",
            "device": "cpu",
            "temperature": 0.0,
            "max_new_tokens": 64,
            "repeat": 3,
            "seed": 0,
            "template": "chat",
            "prompts": {"source": "builtin", "count": 30, "categories": dict.fromkeys(TEXT, 10)},
        },
        "methods": methods,
        "trees": {
            "chain:4": {"parents": [0, 0, 1, 2, 3]},
            "mcsd:4x2x2x1x1": {"parents": widths_tree([4, 2, 2, 1, 1])},
            "ngram+model:4x2x1": {"parents": widths_tree([4, 2, 1])},
        },
        "samples": [_sample(name, category, pattern) for category in TEXT for name, pattern in patterns.items()],
    }


def widths_tree(widths: list[int]) -> list[int]:
    """Parents of a tree whose every node at level i has `widths[i]` children, breadth first."""
    parents, level = [0], [0]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return parents
