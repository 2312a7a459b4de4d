"""What target passes and draft levels cost on this machine: measured once, and kept on disk.

They are for trees whose children are the likeliest tokens, and for tries of n-grams. They are kept because measuring takes a
second or two.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from polydraft.devices import can_sync, captures, cpu_features, wait_for
from polydraft.draft.candidates import best_children
from polydraft.draft.speedup import Costs, cost_curve
from polydraft.draft.trie import Limits, as_draft_tree, grow, trie_ladder
from polydraft.errors import first_line
from polydraft.models import Head, LanguageModel
from polydraft.models.fingerprint import package_version
from polydraft.models.heads.parallel_head import ParallelHead
from polydraft.models.int8_copy import Int8Copy
from polydraft.models.placement import agreed
from polydraft.ngrams import GramOptions, SuffixCache
from polydraft.output import cache_root, written_whole
from polydraft.sampling import draw_one
from polydraft.trees import Block, DraftTree, Topology, causal_block
from polydraft.verify import Naive, NodeWalk

logger = logging.getLogger(__name__)

_SIZES = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_CONTEXT, _BEAM, _NARROW, _CHILDREN = 128, 8, 2, 4
_SMALL_TREE = 16
"""Trees of up to this many nodes have narrow levels."""
_LEAST_REPEATS, _MOST_REPEATS, _SECONDS = 4, 12, 2.0
_TOGETHER = 4
"""Runs timed together on a GPU, to wait for the device only once."""
_DISTURBED = 1.6
"""If the third quartile of repeated times is more than this multiple of the first, the machine was busy."""
_EDITION = 4
"""Version of the tables; older ones are measured again."""
_tables: dict[Path, dict[str, Any]] = {}
"""Tables that this process has read or measured."""
_HOST = 3.2
"""Host time of every round and every draft level, apart from passes and draws, as a multiple of a walk over a lone root: 0.9 ms
in a plain round of a tiny model, where such a walk takes 0.27 ms; 1.1 ms with the bundled model in int8."""
_PERIOD = 24
"""Period of the text in which n-gram lookups are timed: it repeats itself, so that lookups find something."""
Draft = LanguageModel | Head | None
"""The draft; None for n-grams."""


def measured_costs(target: LanguageModel, draft: Draft, nodes: int) -> Costs:
    """Return the costs of this pair on this machine, measuring them the first time (a second or two).

    Parameters
    ----------
    target, draft : the pair
        The draft is None for n-grams.
    nodes : int
        Nodes of the largest tree.
    """
    file = cache_root() / "costs" / f"{_key(target, draft, nodes)}.json"
    if file in _tables:
        return costs_of(_tables[file])
    table = agreed(_read(file))
    if table is None:
        logger.info("measuring what passes of the target and the draft cost here, once ...")
        table = measure(target, draft, nodes)
        if table.pop("spread") < _DISTURBED:
            _write(file, table)
        else:
            table["disturbed"] = True
            logger.info("this machine was busy: costs will be measured again by the next process")
    _tables[file] = table = agreed(table)
    return costs_of(table)


def costs_of(table: Mapping[str, Any]) -> Costs:
    """Convert a table of seconds into costs, in units of a plain round.

    A plain round is a pass over one token, the draw of the next one, and the host's work. Every round has the last two, so
    rounds with trees differ less from plain ones than their passes do. A captured round has no host work.
    """
    host = 0.0 if table.get("captured", False) else table["host"]["root"]
    passes = rising({int(size): seconds + table["draw"]["token"] + host for size, seconds in table["target"].items()})
    plain = passes[min(passes)]
    # N-grams are looked up once, timed as a level; a draft's level has as many small operations as a plain round.
    per_level = table["level"]["tree"] + (0.0 if table.get("grams", False) else host)
    return Costs(
        draft_level=per_level / plain,
        tree_pass=cost_curve(passes),
        overhead=table.get("root", {}).get("pass", 0.0) / plain,
        disturbed=table.get("disturbed", False),
    )


def rising(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the closest times that never fall with the size of a pass; if a larger pass seems faster, that is noise.

    Falling times are replaced by their mean (isotonic regression). A running maximum would instead trust whichever time
    happened to be slowed down.
    """
    runs: list[tuple[float, list[int]]] = []
    for size in sorted(measured):
        mean, members = measured[size], [size]
        while runs and runs[-1][0] > mean:
            earlier, others = runs.pop()
            mean = (earlier * len(others) + mean * len(members)) / (len(others) + len(members))
            members = others + members
        runs.append((mean, members))
    return {size: mean for mean, members in runs for size in members}


@torch.inference_mode()
def measure(target: LanguageModel, draft: Draft, nodes: int) -> dict[str, Any]:
    """Time target passes of several sizes (output head included), draft levels and a draw, in seconds.

    All take turns, so that a disturbance hits each of them a little instead of one of them a lot. Each also runs after what
    precedes it in decoding, which has evicted its data from the CPU's caches: a tree's pass after a draft level, a plain pass
    after another pass. The result is the lower quartile, because disturbances only ever slow things down.
    """
    largest = next((size for size in _SIZES if size >= nodes), _SIZES[-1])
    sizes = [size for size in _SIZES if size <= largest]
    context = target.start(1, _CONTEXT + largest)
    context.prefill([[index % target.vocab_size for index in range(_CONTEXT)]])

    def target_pass(size: int) -> Callable[[], Any]:
        tokens_1T = torch.arange(size, device=target.device)[None] % target.vocab_size
        block = causal_block(1, size, target.device)
        return lambda: target.head(context.extend(tokens_1T, block))

    turns: list[tuple[str, str, Callable[[], Any]]] = []
    beam = _BEAM if nodes > _SMALL_TREE else _NARROW
    level = ("level", "tree", _lookup(target) if draft is None else _draft_level(draft, beam))
    for size in reversed(sizes):
        turns += [level] if size > 1 or len(sizes) == 1 else []
        turns.append(("target", str(size), target_pass(size)))
    if isinstance(draft, ParallelHead):
        turns.append(("root", "pass", _root_pass(draft)))
    turns.append(("draw", "token", _draw(target)))
    in_graphs = captures(target.device) and target.graph_obstacle is None
    if not in_graphs:
        turns.append(("host", "root", _root_walk(target)))
    else:
        turns = [(kind, name, captured(work)) for kind, name, work in turns]
    times: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind, name, _ in turns}
    for _, _, work in turns:  # the first run is slower
        work()
    start, done = time.perf_counter(), 0
    while done < _LEAST_REPEATS or (done < _MOST_REPEATS and time.perf_counter() - start < _SECONDS):
        for kind, name, work in turns:
            times[kind, name].append(timed(work, target.device))
        done += 1
    table: dict[str, Any] = {"captured": in_graphs, "grams": draft is None}
    for (kind, name), found in times.items():
        table.setdefault(kind, {})[name] = sorted(found)[len(found) // 4]
    if not in_graphs:
        table["host"]["root"] *= _HOST
    table["spread"] = statistics.median(
        sorted(found)[3 * len(found) // 4] / sorted(found)[len(found) // 4]
        for (kind, _), found in times.items()
        if kind == "target"
    )
    return table


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of some work's CUDA graph: rounds are captured, and launches would otherwise dominate the time."""
    work()  # libraries initialise themselves, which a capture may not contain
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        logger.info("costs are measured without CUDA graphs: %s", first_line(error))
        return work

    def replay(_: Callable[[], Any] = work) -> None:  # the default keeps alive what the graph reads
        graph.replay()

    return replay


def _lookup(target: LanguageModel) -> Callable[[], Any]:
    """Return the work of a round with n-grams: look them up, and make a tree of them."""
    name, memory = SuffixCache.name, SuffixCache(GramOptions()).open()
    memory.read([index % min(_PERIOD, target.vocab_size) for index in range(_CONTEXT)])
    limits = Limits(nodes=_BEAM, depth=_BEAM, width=_CHILDREN, least=0.0, ladder=trie_ladder(_BEAM))

    def work() -> None:
        trie = grow(0, [name], [memory], limits)
        as_draft_tree([trie], len(trie), _BEAM, target.device)

    return work


def _root_walk(target: LanguageModel) -> Callable[[], Any]:
    """Return part of a plain round's host work: make a lone root and its block, and walk over it."""
    distribution_1V = torch.full((1, target.vocab_size), 1 / target.vocab_size, device=target.device)
    tokens_11 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    uniforms_1U = torch.full((1, 1), 0.5, dtype=torch.float64, device=target.device)

    def work() -> None:
        tree = DraftTree.from_topology(Topology(), tokens_11, (), tokens_11[0])
        tree.block()
        NodeWalk().run(Naive(), tree, lambda node_B, path_BP: distribution_1V, uniforms_1U)

    return work


def _draw(target: LanguageModel) -> Callable[[], Any]:
    """Return the work of drawing a token: a softmax and a draw."""
    logits_1V = 4 * torch.randn(1, target.vocab_size, generator=torch.Generator().manual_seed(0)).to(target.device)
    uniform_1 = torch.full((1,), 0.5, dtype=torch.float64, device=target.device)
    return lambda: _seen(draw_one(torch.softmax(logits_1V, dim=-1), uniform_1))


def _root_pass(head: ParallelHead) -> Callable[[], Any]:
    """Return the work of a parallel head's one pass per round: an entry, the places behind it, and all logits."""
    context, one_1 = head.start(1, 2 * _CONTEXT), torch.ones(1, dtype=torch.long, device=head.device)
    tokens_1W = torch.zeros(1, _CONTEXT, dtype=torch.long, device=head.device)
    fused_1WH = torch.zeros(1, _CONTEXT, head.shape.hidden_size, dtype=head.dtype, device=head.device)
    context.store(tokens_1W, fused_1WH)
    context.rewind([_CONTEXT])
    return lambda: head.head(context.draft(tokens_1W[:, :1], fused_1WH[:, :1], one_1))


def _draft_level(draft: LanguageModel | Head, beam: int) -> Callable[[], Any]:
    """Return the work of one draft level: a pass over its nodes, a softmax, and the children."""
    width = 1 if isinstance(draft, Int8Copy) else beam
    logits = _draft_pass(draft, width)
    scores_1W = torch.zeros(1, width, device=draft.device, dtype=torch.float64)
    return lambda: best_children(scores_1W, torch.softmax(logits().float(), -1), 2 * beam, 8 * beam)


def _draft_pass(draft: LanguageModel | Head, width: int) -> Callable[[], torch.Tensor]:
    """Return the pass over `width` nodes of a level, which gives their logits."""
    device = draft.device
    if isinstance(draft, ParallelHead):  # one pass per round gives all levels
        known_1WD = torch.zeros(1, 1, draft.num_columns, dtype=draft.dtype, device=device).expand(-1, width, -1)
        return lambda: known_1WD
    context: Any = draft.start(1, _CONTEXT + width)
    tokens_1T = torch.zeros(1, _CONTEXT, dtype=torch.long, device=device)
    own_1WU = torch.eye(width, dtype=torch.bool, device=device)[None]
    block = Block(0, torch.zeros(1, width, dtype=torch.long, device=device), own_1WU, levels=(width,))
    if isinstance(draft, Head):
        features_1TH = torch.zeros(1, _CONTEXT, draft.hidden_size, dtype=draft.dtype, device=device)
        context.read(tokens_1T, features_1TH, causal_block(1, _CONTEXT, device))
        context.rewind([_CONTEXT])
        return lambda: draft.head(context.read(tokens_1T[:, :width], features_1TH[:, :width], block))
    context.extend(tokens_1T, causal_block(1, _CONTEXT, device))
    context.rewind([_CONTEXT])
    return lambda: draft.head(context.extend(tokens_1T[:, :width], block))


def _seen(tokens_1: torch.Tensor) -> object:
    """Read tokens on the host, unless that means waiting for a device."""
    return tokens_1.tolist() if can_sync(tokens_1) else tokens_1


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that some work takes; on a GPU, the mean of several runs, because rounds run ahead of the host."""
    times = _TOGETHER if captures(device) else 1
    start = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return (time.perf_counter() - start) / times


def _key(target: LanguageModel, draft: Draft, nodes: int) -> str:
    """Return a name made of all that the costs depend on."""
    place = f"cpu{torch.get_num_threads()}"
    if captures(target.device):
        place = f"{torch.cuda.get_device_name(target.device)} {'captured' if target.graph_obstacle is None else 'eager'}"
    kind = "int8" if getattr(target, "int8", False) else getattr(target, "dtype", "table")
    native = "native" if getattr(target, "native", None) is not None else "torch"
    version = hashlib.sha256(f"{_EDITION} {package_version()} {torch.__version__} {cpu_features()}".encode()).hexdigest()[:8]
    words = (target.name, "ngrams" if draft is None else draft.name, kind, native, place, nodes, version)
    return "_".join("".join(letter if letter.isalnum() else "-" for letter in str(word))[-40:] for word in words)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        table = json.loads(file.read_text())
        parts = ["target", "level", "draw", *([] if table["captured"] else ["host"])]
        good = all(int(size) > 0 for size in table["target"]) and {"tree", "token"} <= {*table["level"], *table["draw"]}
        good = good and all(seconds > 0 for part in parts for seconds in table[part].values())
        return dict(table) if good and table["target"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(file: Path, table: dict[str, Any]) -> None:
    """Keep the table, completely or not at all; if that fails, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as partial:
            partial.write_text(json.dumps(table))
    except OSError as error:
        logger.warning(
            "cannot keep the measured costs in %s (%s): the next process measures them again",
            file,
            error.strerror,
        )
