"""What target passes and draft levels cost on this machine: measured once, and kept.

Kept on disk, because trees that are chosen by costs decide which random number meets which token: with one table for a
machine the same seed gives the same text there.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from polydraft.atomic import written_whole
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.bundled import cache_root
from polydraft.schemes import SCHEMES
from polydraft.theory import Costs, cost_curve
from polydraft.trees import Block, causal_block

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_CONTEXT, _REPEATS, _BEAM = 128, 5, 8
_tables: dict[Path, dict[str, Any]] = {}
"""What this process has read or measured."""
SCHEMES_MEASURED = ("top", "hybrid")
"""What dynamic trees verify by, at temperature 0 and above."""


def measured_costs(target: LanguageModel, draft: LanguageModel | FeatureHead, nodes: int, scheme: str) -> Costs:
    """Return costs of this pair on this machine, measuring them the first time (a second or two).

    Parameters
    ----------
    target, draft : the pair
    nodes : int
        Largest tree.
    scheme : str
        By which children are drawn and verified: what that costs a level counts.
    """
    file = cache_root() / "costs" / f"{_key(target, draft, nodes)}.json"
    table = _tables.get(file) or _read(file)
    if table is None:
        logger.info("measuring what passes of the target and the draft cost here, once ...")
        table = measure(target, draft, nodes)
        _write(file, table)
    _tables[file] = table
    # A larger pass that seems faster is noise.
    sizes = sorted(map(int, table["target"]))
    passes = dict(zip(sizes, accumulate((table["target"][str(size)] for size in sizes), max), strict=True))
    level = table["level"] + table["verification"].get(scheme, 0.0)
    return Costs(draft_level=level / passes[sizes[0]], tree_pass=cost_curve(passes))


@torch.inference_mode()
def measure(target: LanguageModel, draft: LanguageModel | FeatureHead, nodes: int) -> dict[str, Any]:
    """Time target passes of several sizes, its output head included, and one level of the draft; medians, in seconds."""
    largest = next((size for size in _SIZES if size >= nodes), _SIZES[-1])
    sizes = [size for size in _SIZES if size <= largest]
    context = target.start(1, _CONTEXT + largest)
    context.prefill([[index % target.vocab_size for index in range(_CONTEXT)]])

    def target_pass(size: int) -> Callable[[], Any]:
        tokens_1T = torch.arange(size, device=target.device)[None] % target.vocab_size
        block = causal_block(1, size, target.device)
        return lambda: target.head(context.extend(tokens_1T, block))

    return {
        "target": {str(size): _median(target_pass(size), target.device) for size in sizes},
        "level": _median(_draft_level(draft), target.device),
        "verification": {name: _median(_verification(name, target), target.device) for name in SCHEMES_MEASURED},
    }


def _verification(name: str, target: LanguageModel) -> Callable[[], Any]:
    """Return a level's other work: drawing for the beam, and one node's law and verification."""
    scheme, generator = SCHEMES.get(name)(), torch.Generator().manual_seed(0)
    logits_WV = 4 * torch.randn(_BEAM // 2, target.vocab_size, generator=generator).to(target.device)
    uniforms_WU = torch.rand(_BEAM // 2, max(scheme.verify_uniforms, 4), generator=generator, dtype=torch.float64)
    uniforms_WU = uniforms_WU.to(target.device)

    def work() -> None:
        probs_WV = torch.softmax(logits_WV, dim=-1)
        children_WK = scheme.draw(probs_WV, uniforms_WU[:, :2])
        scheme.verify(probs_WV[:1], probs_WV[1:2], children_WK[1:2], uniforms_WU[:1, : scheme.verify_uniforms])

    return work


def _draft_level(draft: LanguageModel | FeatureHead) -> Callable[[], Any]:
    """Return one level's work: a pass of the beam, its laws, and the likeliest tokens of each."""
    context: Any = draft.start(1, _CONTEXT + _BEAM)
    size, device = (_CONTEXT, draft.device)
    tokens_1T = torch.zeros(1, size, dtype=torch.long, device=device)
    own_1WU = torch.eye(_BEAM, dtype=torch.bool, device=device)[None]
    block = Block(0, torch.zeros(1, _BEAM, dtype=torch.long, device=device), own_1WU)
    if isinstance(draft, FeatureHead):
        zeros: Any = {"dtype": draft.dtype, "device": device}
        context.read(tokens_1T, torch.zeros(1, size, draft.shape.hidden_size, **zeros), causal_block(1, size, device))
        fused_1WH = torch.zeros(1, _BEAM, draft.shape.hidden_size, **zeros)

        def read() -> torch.Tensor:
            return context.read(tokens_1T[:, :_BEAM], fused_1WH, block)  # type: ignore[no-any-return]

    else:
        context.extend(tokens_1T, causal_block(1, size, device))

        def read() -> torch.Tensor:
            return context.extend(tokens_1T[:, :_BEAM], block)  # type: ignore[no-any-return]

    context.rewind([size])
    return lambda: torch.softmax(draft.head(read()).float(), -1).topk(min(16, draft.num_columns))


def _median(work: Callable[[], Any], device: torch.device) -> float:
    """Time some work, after one run to warm up."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    return statistics.median(timed() for _ in range(_REPEATS))


def _key(target: LanguageModel, draft: LanguageModel | FeatureHead, nodes: int) -> str:
    """Name what the costs depend on."""
    place = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else f"cpu{torch.get_num_threads()}"
    words = (target.name, draft.name, getattr(target, "dtype", "table"), place, nodes)
    return "_".join("".join(letter if letter.isalnum() else "-" for letter in str(word))[-40:] for word in words)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        table = json.loads(file.read_text())
        good = table["level"] > 0 and set(table["verification"]) >= set(SCHEMES_MEASURED)
        good = good and all(int(size) > 0 and seconds > 0 for size, seconds in table["target"].items())
        return dict(table) if good and table["target"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(file: Path, table: dict[str, Any]) -> None:
    """Keep the table, whole or not at all; without room for it the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as partial:
            partial.write_text(json.dumps(table))
    except OSError as error:
        logger.info("cannot keep the measured costs in %s (%s)", file, error.strerror)
