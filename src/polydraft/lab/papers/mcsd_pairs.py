"""MCSD's Tables 1, 3, 5 to 7 in kind: how the sizes of draft and target, their kinship and fine-tuning affect acceptance.

Drafts for the bundled target are its own first layers, in several numbers. The other pairs are separate models:
`benchmarks/mcsd_pairs.py` puts them into the folder `models`, and without them their runs are left out.
"""

from dataclasses import dataclass, replace
from typing import Any

from polydraft.lab.estimate import Estimate, difference
from polydraft.lab.papers.paper import Comparison, Results, Run, ordering, run_name, text_of

FOLDER = "models"
"""Folder with the models of the other pairs, relative to the working directory of the benchmark."""
QWEN, TINY_LLAMA = (
    f"{FOLDER}/{name}" for name in ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "tinyllama-1.1b-chat-v1.0.IQ2_XXS.gguf")
)
QWEN_DRAFTS = {"30m": (3, 192), "120m": (4, 640)}
"""Layers and width of the drafts distilled from Qwen2.5-Coder, by number of parameters, its 152k embeddings included."""
STORIES, STORIES_TUNED = f"{FOLDER}/stories15M", f"{FOLDER}/stories15M-tuned"
ONE, FOUR = (f"mcsd:{width},scheme=rrs-wor,walk=node" for width in (1, 4))
CHAIN, TREE = "sd:5,scheme=speculative,walk=node", "mcsd:4x2x2x1x1,scheme=rrs-wor,walk=node"
SETS, TEMPERATURES = {"alpaca": "Alpaca", "wmt_ende": "WMT"}, (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A draft and a target."""

    name: str
    about: str
    """Names of both models, for tables."""
    draft: str
    target: str | None = None
    """None for the benchmark's own target, whose speed is not measured here."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Runs that count acceptance on both sets of prompts, and time the pair, at both temperatures."""
        settings = {"draft": self.draft} | ({} if self.target is None else {"target": self.target})
        needs = () if self.target is None else (self.target, self.draft)
        more: dict[str, Any] = {"settings": settings, "needs": needs}
        counted = [
            run for prompts in SETS for run in Run.of_acceptance(prompts, TEMPERATURES, (ONE, FOUR, CHAIN, TREE), **more)
        ]
        speeds = TEMPERATURES if self.target is not None else ()
        timed = [Run.of_speed(temperature, ("ar", CHAIN, TREE), **more) for temperature in speeds]
        return tuple(replace(run, name=f"{self.name}-{run.name}") for run in (*counted, *timed))

    def run(self, what: str, temperature: float) -> str:
        """Return the name of a run of this pair."""
        return f"{self.name}-{run_name(what, temperature)}"


_LAYERS = (20, 25, 28)
FIRST_LAYERS = tuple(
    Pair(name=f"first-{layers}", about=f"SmolLM2-135M, its own first {layers} of 30 layers", draft=f"early-exit:{layers}")
    for layers in _LAYERS
)
DISTILLED = tuple(
    Pair(
        name=f"qwen-{size}",
        about=f"Qwen2.5-Coder-1.5B-Instruct, {size.upper()} distilled from it",
        target=QWEN,
        draft=f"{FOLDER}/qwen-draft-{size}",
    )
    for size in QWEN_DRAFTS
)
UNRELATED = Pair(name="stories", about="TinyLlama-1.1B-Chat, stories15M", target=TINY_LLAMA, draft=STORIES)
TUNED = Pair(name="stories-tuned", about="TinyLlama-1.1B-Chat, stories15M fine-tuned", target=TINY_LLAMA, draft=STORIES_TUNED)
PAIRS = (*FIRST_LAYERS, *DISTILLED, UNRELATED, TUNED)
RUNS = tuple(run for pair in PAIRS for run in pair.runs)


def pairs_table(results: Results) -> Comparison:
    """Return the table with acceptance and speed of all pairs."""
    rows = []
    for pair in PAIRS:
        for temperature in TEMPERATURES:
            alphas = [_widths(results, pair.run(prompts, temperature)) for prompts in SETS]
            tau = [results.text(pair.run("alpaca", temperature), method, "tokens_per_pass") for method in (CHAIN, TREE)]
            speed = [results.text(pair.run("speed", temperature), method, "speedup", "×") for method in (CHAIN, TREE)]
            rows.append([pair.about, f"{temperature:g}", *alphas, *tau, *speed])
    return Comparison(
        key="pairs",
        title="Tables 1, 3 and 5 to 7 in kind: sizes, kinship and fine-tuning",
        runs=tuple(run.name for run in RUNS),
        columns=["target, draft", "T", "α@1 → α@4, Alpaca", "α@1 → α@4, WMT", "τ, SD", "τ, MCSD", "speed-up, SD", "MCSD"],
        ours=rows,
        published_note="Tables 1 to 3 and 5 to 7; Vicuna-68M and -160M are LLaMA-68M and -160M fine-tuned; α@1 → α@4, or α@1 "
        "where the paper has no more; speed-up with the best γ and k",
        published_columns=["draft", "target", "T", "α, Alpaca", "α, WMT", "speed-up on Alpaca, SD", "MCSD"],
        published=[
            ["LLaMA-68M", "Vicuna-13B", "0", "0.49 → 0.67", "0.36 → 0.51", "1.49×", "1.82×"],
            ["LLaMA-68M", "Vicuna-33B", "0", "0.52", "0.22", "1.70×", "2.06×"],
            ["LLaMA-160M", "Vicuna-13B", "0", "0.54 → 0.73", "0.39 → 0.54", "1.16×", "1.39×"],
            ["LLaMA-160M", "Vicuna-33B", "0", "0.54", "0.25", "1.40×", "1.72×"],
            ["Vicuna-68M", "Vicuna-13B", "0", "0.56 → 0.76", "0.38 → 0.57", "–", "–"],
            ["Vicuna-160M", "Vicuna-13B", "0", "0.62 → 0.81", "0.40 → 0.58", "–", "–"],
            ["OPT-125M", "OPT-13B", "0", "0.86 → 0.95", "0.97 → 0.99", "–", "–"],
            ["LLaMA-68M", "Vicuna-13B", "1", "0.35 → 0.57", "0.25 → 0.41", "1.30×", "1.64×"],
            ["LLaMA-68M", "Vicuna-33B", "1", "0.35", "0.24", "1.34×", "1.73×"],
            ["LLaMA-160M", "Vicuna-13B", "1", "0.42 → 0.63", "0.29 → 0.45", "1.09×", "1.29×"],
            ["LLaMA-160M", "Vicuna-33B", "1", "0.42", "0.25", "1.24×", "1.62×"],
            ["Vicuna-68M", "Vicuna-13B", "1", "0.46 → 0.68", "0.29 → 0.45", "–", "–"],
            ["Vicuna-160M", "Vicuna-13B", "1", "0.53 → 0.74", "0.31 → 0.48", "–", "–"],
            ["OPT-125M", "OPT-13B", "1", "0.63 → 0.81", "0.59 → 0.78", "–", "–"],
        ],
        remark="SD is a chain of 5, MCSD the tree 4x2x2x1x1. The target's own first layers say what a draft's size does to "
        "acceptance; nobody would draft with most of a model, so their speed is not measured. No two targets here share a "
        "draft: what a target's size alone does is not seen. The paper finds no clear effect of it.",
    )


def _widths(results: Results, run: str) -> str:
    return " → ".join(text_of(results.figure(run, method, "acceptance_rate")) for method in (ONE, FOUR))


def pair_claims(results: Results) -> list[list[str]]:
    """Return the rows of the paper's claims about sizes, kinship and fine-tuning."""

    def alpha(pair: Pair, method: str = ONE) -> Estimate | None:
        return results.figure(pair.run("alpaca", 1.0), method, "acceptance_rate")

    def gained(pair: Pair) -> Estimate | None:
        return difference(alpha(pair, FOUR), alpha(pair))

    layers = [(f"{count} layers", alpha(pair)) for count, pair in zip(_LAYERS, FIRST_LAYERS, strict=True)]
    sizes = [(size.upper(), alpha(pair)) for size, pair in zip(QWEN_DRAFTS, DISTILLED, strict=True)]
    tuned = [("fine-tuned", alpha(TUNED)), ("as it was", alpha(UNRELATED))]
    delta = [("fine-tuned", gained(TUNED)), ("as it was", gained(UNRELATED))]
    no_targets = "no two targets here share a draft"
    related = [("distilled, 30M", alpha(DISTILLED[0])), ("unrelated, 15M", alpha(UNRELATED))]
    other = "another pair: `python benchmarks/mcsd_pairs.py` trains its drafts"
    return [
        ordering("α at T=1 grows with the draft's size (first layers of the target)", *reversed(layers)),
        ordering("α at T=1 grows with the draft's size (distilled drafts)", *reversed(sizes), missing=other),
        ordering("α at T=1 is higher where draft and target are related", *related, missing=other),
        ordering("α hardly depends on the target's size", ("large", None), ("small", None), why=no_targets, alike=True),
        ordering("fine-tuning the target lowers α", ("as it was", None), ("fine-tuned", None), why=no_targets),
        ordering("fine-tuning a draft raises α (T=1)", *tuned, missing=other),
        ordering("several candidates gain more after fine-tuning: α@4 − α@1 (T=1)", *delta, missing=other),
    ]
