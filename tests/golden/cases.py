"""What the code did at one time, for fixed seeds: texts, rounds and acceptance that a rebuilt engine must give again.

`PYTHONPATH=tests python -m tests.golden.cases` writes the file anew. Do so only for a change that is meant, and say in the
commit which cases it touches and why.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.exactness.configurations import SCHEMES_AND_WALKS
from tests.exactness.setups import (
    DRAFT,
    EVERY_DRAFTER,
    GRAM_PROMPT,
    HEAD,
    PENALTIES,
    RAGGED_PROMPTS,
    TARGET,
    make_decoder,
    tree_for,
)
from tests.families import FAMILIES

from polydraft.beam import BeamDecoder
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Generation
from polydraft.lab.theory import Costs
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape

FILE = Path(__file__).with_name("golden.json")
GREEDY, PLAIN = SamplingParams(temperature=0), SamplingParams()
TRUNCATED = SamplingParams(temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.3)
SAMPLING = {"greedy": GREEDY, "plain": PLAIN, "truncated": TRUNCATED, "penalties": PENALTIES}
PROMPTS = [*RAGGED_PROMPTS, list(GRAM_PROMPT)]
COSTS = {
    "cheap": Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes),
    "balanced": Costs(draft_level=0.1, tree_pass=lambda nodes: 1 + 0.05 * (nodes - 1)),
    "losing": Costs(draft_level=0.9, tree_pass=lambda nodes: 1 + 0.3 * (nodes - 1)),
}


def summary(results: list[Generation]) -> dict[str, Any]:
    """What must stay: the texts, why they ended, and how many rounds and acceptances it took."""
    stats = results[0].stats
    return {
        "texts": [result.token_ids for result in results],
        "ends": [str(result.stop_reason) for result in results],
        "rounds": stats.rounds,
        "passes": stats.passes,
        "offers": stats.offers_by_depth,
        "accepts": stats.accepts_by_depth,
        "sources": {source: count for source, count in sorted(stats.tokens_by_source.items()) if count},
    }


def decoded(decoder: Decoder, sampling: SamplingParams, **options: Any) -> dict[str, Any]:
    seeds = list(range(7, 7 + len(PROMPTS)))
    return summary(decoder.generate(PROMPTS, sampling=sampling, max_new_tokens=24, seed=seeds, **options))


@cache
def small_llama() -> HFModel:
    return HFModel(FAMILIES.get("llama").build(seed=1))


def beams(mode: str, **options: Any) -> dict[str, Any]:
    decoder = BeamDecoder(make_decoder(eos_token_ids=[13]))
    run = getattr(decoder, mode)
    results = [run(prompt, max_new_tokens=10, **options) for prompt in RAGGED_PROMPTS]
    return {
        "texts": [[text.token_ids for text in result.texts] for result in results],
        "rounds": [result.stats.rounds for result in results],
    }


def _cases() -> dict[str, Callable[[], dict[str, Any]]]:
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for drafter in EVERY_DRAFTER:
        for name, sampling in SAMPLING.items():
            cases[f"drafter {drafter}, {name}"] = lambda drafter=drafter, sampling=sampling: decoded(
                make_decoder(drafter=drafter, scheme="auto", walk="auto", eos_token_ids=[13]), sampling
            )
    for scheme, walk in SCHEMES_AND_WALKS:
        cases[f"scheme {scheme}, walk {walk}"] = lambda scheme=scheme, walk=walk: decoded(
            make_decoder(scheme=scheme, walk=walk, tree=tree_for(scheme)), PLAIN
        )
    for tree in ("chain:4", "fork:3x3", "[[0],[1],[2],[0,0],[0,1],[2,0],[0,0,0],[0,1,0],[0,1,1]]"):
        cases[f"tree {tree}"] = lambda tree=tree: decoded(make_decoder(tree=tree, scheme="auto", walk="auto"), PLAIN)
    for label, costs in COSTS.items():
        for kind, draft in (("model", DRAFT), ("head", HEAD)):
            for name in ("greedy", "plain"):
                cases[f"dynamic {kind}, {label}, {name}"] = lambda draft=draft, costs=costs, name=name: decoded(
                    Decoder(TARGET, TreeDrafter(draft, DynamicShape(nodes=16, depth=4), costs=costs)), SAMPLING[name]
                )
    cases["llama, plain decoding"] = lambda: decoded(Decoder(small_llama()), GREEDY)
    cases["beam search"] = lambda: beams("search", beams=3)
    cases["beam search, penalty"] = lambda: beams("search", beams=4, length_penalty=0.5, early_stopping=True)
    cases["beam sampling"] = lambda: beams("sample", beams=3, seed=5)
    return cases


CASES = _cases()


def main() -> None:
    found = {name: case() for name, case in CASES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stderr.write(f"{len(found)} cases, {FILE.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
