"""Tiny checkpoints with what is published for them as drafts, as real networks: an MTP layer, an assistant."""

import tempfile
from functools import cache
from pathlib import Path

from models import assistant_cases
from models.mtp_cases import MTP_CASES, build, write
from polydraft.draft import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.models.heads.assistant_folder import load_assistant
from polydraft.models.heads.head import Head
from polydraft.models.heads.mtp_folder import load_mtp
from polydraft.models.hf import HFModel
from polydraft.trees import DynamicShape, parse_tree

from .setups import VOCABULARY

SHIPPED = ("layer", "assistant")


@cache
def shipped_pair(kind: str = "layer") -> tuple[HFModel, Head]:
    """Return a target of experts and the layer among its weights, or one whose keys and values its assistant reads."""
    with tempfile.TemporaryDirectory(prefix="polydraft-tests-") as folder:
        if kind == "assistant":
            model, assistant = assistant_cases.build("31B", VOCABULARY)
            target = HFModel(model, trusted=True, native=False)
            return target, load_assistant(assistant_cases.write(assistant, Path(folder)), target, None, kind)
        parts = build(MTP_CASES["glm4_moe"], vocab_size=VOCABULARY)
        target = HFModel(parts.model, trusted=True, native=False)
        return target, load_mtp(write(parts, Path(folder)), target, None, kind)


def make_shipped_decoder(*, scheme: str, walk: str, tree: str, drafter: str, kind: str = "layer") -> Decoder:
    """Build a decoder whose draft is the layer, or the assistant."""
    target, head = shipped_pair(kind)
    dynamic = DynamicShape(nodes=8, depth=4, adaptive=False) if drafter.endswith("dynamic-head") else None
    topology = parse_tree("none" if dynamic else tree)
    parts = Parts(draft=head, topology=topology, dynamic=dynamic, scheme=scheme)
    return Decoder(target, make_drafter(parts, drafter), walk=walk)
