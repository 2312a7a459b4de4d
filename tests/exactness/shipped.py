"""A tiny checkpoint with an MTP layer that drafts for it, as real networks."""

import tempfile
from functools import cache
from pathlib import Path

from models.mtp_cases import MTP_CASES, build, write
from polydraft.draft import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.models.heads.mtp import MtpHead
from polydraft.models.heads.mtp_folder import load_mtp
from polydraft.models.hf import HFModel
from polydraft.trees import DynamicShape, parse_tree

from .setups import VOCABULARY


@cache
def shipped_pair() -> tuple[HFModel, MtpHead]:
    """Return a target of experts and the layer among its weights."""
    parts = build(MTP_CASES["glm4_moe"], vocab_size=VOCABULARY)
    target = HFModel(parts.model, trusted=True, native=False)
    with tempfile.TemporaryDirectory(prefix="polydraft-tests-") as folder:
        return target, load_mtp(write(parts, Path(folder)), target, None, "layer")


def make_shipped_decoder(*, scheme: str, walk: str, tree: str, drafter: str) -> Decoder:
    """Build a decoder whose draft is the layer."""
    target, head = shipped_pair()
    dynamic = DynamicShape(nodes=8, depth=4, adaptive=False) if drafter.endswith("dynamic-head") else None
    topology = parse_tree("none" if dynamic else tree)
    parts = Parts(target=target, draft=head, topology=topology, dynamic=dynamic, scheme=scheme)
    return Decoder(target, make_drafter(parts, drafter), walk=walk)
