"""Compiling a round's kernels in several threads, the first time on a GPU.

A kernel is compiled when it is first launched, and a round launches about forty of them, one after the other: 16 seconds on a
fast machine. Most of the compiler's work needs no Python, so threads that launch later kernels on made-up values save time.
Kernels that they miss, because a round launches them in another form, are compiled in the round as usual. See
docs/decisions/045-kernels-compile-in-threads.md.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from polydraft.backends import triton as kernels
from polydraft.devices import captures
from polydraft.engine.round import State, distributions
from polydraft.engine.warm_up import compiling_ahead
from polydraft.models.hf import HFModel
from polydraft.operations import implements
from polydraft.trees import DraftTree, Topology
from polydraft.verify import Walk

_LOGGER = logging.getLogger("polydraft")
_MOST_SLOTS = 4096
"""Most slots of a cache used only for compiling: large batches may reserve nearly all memory for their own."""


def _supports(state: State, walk: Walk) -> bool:
    return isinstance(state.target, HFModel) and kernels.are_new(state.target.device)


@implements(compiling_ahead, "triton", supports=_supports)
@contextmanager
def _in_threads(state: State, walk: Walk) -> Iterator[None]:
    """Let threads compile while a batch's first round runs.

    They use the round's stream, so that tensors which one of them creates and others share are ready in time, and do not write
    to anything that the round reads. The context waits for them at its end: the next round is captured, and no other thread may
    launch anything then.
    """
    device, threads = state.target.device, list[threading.Thread]()
    stream = torch.cuda.current_stream(device) if captures(device) else None
    for work in (_pass_through_target, _draw_and_verify):
        threads.append(threading.Thread(target=_quietly, args=(work, state, walk, stream), daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _quietly(work: Callable[[State, Walk], None], state: State, walk: Walk, stream: torch.cuda.Stream | None) -> None:
    """Do some work and ignore errors: the round runs into them as well, and reports them."""
    try:
        with torch.inference_mode(), torch.cuda.stream(stream):  # both are per thread; a stream of None changes nothing
            work(state, walk)
    except Exception as error:
        _LOGGER.debug("compiling ahead failed: %s", error)


def _pass_through_target(state: State, walk: Walk) -> None:
    """Pass a tree through the target with a separate cache, if our kernels run its layers.

    Torch's layers need no compiling, and change settings of the whole process.
    """
    target, session, rows = state.target, state.session, len(state.tail_B2)
    if not isinstance(target, HFModel) or target.fast is None:
        return
    topology = Topology.likeliest(session.num_nodes, session.depth) if session.depth else Topology()
    tokens_BN = torch.zeros(rows, topology.num_nodes, dtype=torch.long, device=target.device)
    tree = DraftTree.from_topology(topology, tokens_BN, (), tokens_BN[0])
    span = state.memory.context.span or session.num_nodes
    if rows * span > _MOST_SLOTS:
        return
    context = target.start(rows, span)
    context.places = session.num_nodes
    context.fix_span(span)
    context.extend(tree.tokens_BN, tree.block())


def _draw_and_verify(state: State, walk: Walk) -> None:
    """Build a made-up tree and verify it."""
    target, session = state.target, state.session
    assert isinstance(target, HFModel)
    tree = session.made_up(target.dtype)
    if tree is None:
        return
    width = target.hidden_size * (1 + len(target.taps))
    features_BNF = torch.zeros(*tree.tokens_BN.shape, width, dtype=target.dtype, device=target.device)
    numbers = walk.uniforms(session.scheme, session.depth)
    uniforms_BU = torch.zeros(len(tree.tokens_BN), numbers, dtype=torch.float64, device=target.device)
    walk.run(session.scheme, tree, distributions(state, features_BNF), uniforms_BU)
