"""Options that several commands share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.machine import DEVICE, DTYPE, THREADS, check_threads, set_threads
from polydraft.cli.ngram_options import NGRAM_OPTIONS, NgramChoices
from polydraft.cli.option_list import with_options
from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.engine import Decoder
    from polydraft.sampling import SamplingParams

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--target", default="smollm2", show_default=True, help="Target model: smollm2 (bundled), a folder, a hub name, or inflated:7b (bundled, at a large model's cost)."),
    click.option("--draft", default="auto", show_default=True, help="Draft model: a folder or hub name, early-exit:k (first k layers of the target), none, or auto."),
    click.option("--tree", default="auto", show_default=True, help="Draft tree: children a level (4x2x2x1x1), chain:5, fork:16x5, [[0],[1],[0,0]], dynamic:64 (at most 64 nodes, chosen each round), none, or auto."),
    click.option("--scheme", default="auto", show_default=True, help="How candidates are drawn and verified; 'polydraft info' lists the schemes."),
    click.option("--walk", default="auto", show_default=True, help="In which order a tree is verified: node, block, traversal or auto."),
    click.option("--draft-temperature", type=float, default=None, help="Temperature of the draft  [default: the target's]."),
    click.option("--decision", default=None, help="Decision model that ends drafting early: a folder, or auto for the shipped one."),
    click.option("--stop-below", type=float, default=0.4, show_default=True, help="Threshold of the decision model, 0 to 1."),
    click.option("--lossy", default=None, help="Change the law of the text: target-init (improved MCSD's trees) or flat-blocks (n-grams as Self-Draft verifies them)."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens up to this mass."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="Keep tokens this likely relative to the likeliest."),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1 discourages repetition."),
    click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Most tokens to generate."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same text (dynamic trees: on one machine, with as many threads)."),
    click.option("--stop", multiple=True, help="String that ends the text; may be given several times."),
    DEVICE,
    click.option("--device-map", default=None, help="For targets larger than one device: auto, balanced, sequential, or tp under torchrun."),
    DTYPE,
    click.option("--graphs/--no-graphs", default=True, show_default=True, help="On a GPU, replay whole rounds as CUDA graphs."),
    click.option("--compiled", is_flag=True, help="On a GPU, compile drawing and verification: 20 seconds once, then faster above T=0."),
    THREADS,
]  # fmt: skip


def arrange_messages() -> None:
    """Let this library say on standard error what takes long, and keep others' chatter off the screen."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("polydraft")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


shared_options = with_options([*_OPTIONS, *NGRAM_OPTIONS])
"""Add the options of model, tree and sampling to a command."""


@dataclass(frozen=True, kw_only=True)
class Choices(NgramChoices):
    """What the shared options were set to."""

    target: str
    draft: str
    tree: str
    scheme: str
    walk: str
    draft_temperature: float | None
    decision: str | None
    stop_below: float
    lossy: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...]
    device: str
    device_map: str | None
    dtype: str
    graphs: bool
    compiled: bool
    threads: int | None

    def check(self) -> "SamplingParams":
        """Check what can be checked without a model, and return the sampling parameters."""
        from polydraft.sampling import SamplingParams

        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens} is out of range; allowed: whole numbers from 1")
        check_threads(self.threads)
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    def request(self, params: "SamplingParams") -> dict[str, Any]:
        """Return what every request asks for."""
        return {"sampling": params, "max_new_tokens": self.max_new_tokens, "seed": self.seed, "stop": self.stop}

    def decoder(self) -> "Decoder":
        """Load the models."""
        from polydraft.loading import load

        arrange_messages()
        set_threads(self.threads)
        return load(
            self.target,
            self.draft,
            tree=self.tree,
            scheme=self.scheme,
            walk=self.walk,
            draft_temperature=self.draft_temperature,
            decision=self.decision,
            stop_below=self.stop_below,
            lossy=self.lossy,
            device=self.device,
            graphs=self.graphs,
            compiled=self.compiled,
            device_map=self.device_map,
            dtype=self.dtype,
            drafter=self.drafter,
            grams=self.grams(),
        )
