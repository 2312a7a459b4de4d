"""From names to a working decoder."""

import math

import torch

from polydraft.decision import DEFAULT_THRESHOLD, check_threshold, load_decision
from polydraft.drafters import LOSSY_DRAFTERS, Parts, check_lossy, make_drafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.schemes import SCHEMES
from polydraft.trees import Topology, parse_dynamic, parse_tree
from polydraft.walks import check_walk

DEFAULT_TREE = "4x2x2x1x1"
DEFAULT_PAIRS = {BUNDLED: ("smollm2-head", "4x2x1")}
"""Draft and tree that ``"auto"`` means for a target. Other targets decode plainly until they are given a draft."""
NARROW_TREE = "chain:3"
"""The tree of such a pair on a CPU in float32, where every node costs: nothing pays there, this loses least."""


def load(
    target: str = BUNDLED,
    draft: str = "auto",
    *,
    tree: str = "auto",
    scheme: str = "auto",
    walk: str = "auto",
    draft_temperature: float | None = None,
    decision: str | None = None,
    stop_below: float = DEFAULT_THRESHOLD,
    lossy: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> Decoder:
    """Load a target and a draft and return the decoder.

    Parameters
    ----------
    target : str
        ``"smollm2"`` (bundled), a folder with a Hugging Face model, or a hub name.
    draft : str
        A folder or hub name of a model with the same tokens, ``"early-exit:k"`` for the target's own first k layers,
        ``"none"`` for plain decoding, or ``"auto"``.
    tree : str
        Shape of the draft tree, see `polydraft.trees.parse_tree`, or ``"dynamic:NODES:DEPTH"`` for one that is chosen anew in
        every round, see `polydraft.trees.parse_dynamic`; ``"auto"`` is ``"4x2x2x1x1"``, or what suits the
        draft that ``draft="auto"`` picked.
    scheme : str
        How candidates are drawn and verified, or ``"auto"``. Every scheme is exact; they differ in speed.
    walk : str
        In which order a tree is verified, or ``"auto"``. Every walk is exact; they differ in speed.
    draft_temperature : float, optional
        Temperature of the draft; the target's if not given. Changes speed, never the law of the text.
    decision : str, optional
        Folder of a decision model for the draft, which ends drafting early, or ``"auto"`` for the one that ships with it.
    stop_below : float
        Threshold β of the decision model.
    lossy : str, optional
        A drafter that changes the law of the text, by name: ``"target-init"``. Never chosen otherwise.
    device, dtype : str
        ``"auto"`` picks a GPU if there is one, and bfloat16 where the hardware computes in it.

    Returns
    -------
    Decoder
    """
    # Everything that can be checked without loading a model comes first: a typing error should not cost a minute.
    usual_draft, usual_tree = DEFAULT_PAIRS.get(target, ("none", DEFAULT_TREE))
    place = resolve_device(device)
    number_format = resolve_dtype(dtype, place)
    if tree == "auto":
        narrow = place.type == "cpu" and number_format is torch.float32 and target in DEFAULT_PAIRS
        tree = DEFAULT_TREE if draft != "auto" else NARROW_TREE if narrow else usual_tree
    dynamic = parse_dynamic(tree)
    topology = Topology() if dynamic is not None else parse_tree(tree)
    if dynamic is not None and scheme != "auto":
        raise UsageError(f"scheme {scheme!r} with tree {tree!r}; allowed: auto, because dynamic trees choose their own")
    check_threshold(stop_below)
    if lossy is not None:
        check_lossy(lossy, topology)
    if scheme != "auto":
        SCHEMES.get(scheme)
    check_walk(walk, scheme)
    if draft_temperature is not None and not 0 <= draft_temperature < math.inf:
        raise UsageError(f"draft_temperature={draft_temperature!r} is out of range; allowed: 0 or more")
    loaded = load_model(target, place, number_format)
    draft_model = load_draft(usual_draft if draft == "auto" else draft, loaded)
    if decision is not None and draft_model is None:
        raise UsageError("a decision model needs a draft; pass draft=NAME, a folder, or early-exit:k")
    parts = Parts(
        target=loaded.model,
        draft=draft_model,
        topology=topology,
        scheme=scheme,
        draft_temperature=draft_temperature,
        dynamic=dynamic,
        decision=load_decision(decision, draft_model, stop_below) if decision is not None and draft_model is not None else None,
    )
    drafter = make_drafter(parts) if lossy is None else LOSSY_DRAFTERS.get(lossy)(parts)
    return Decoder(
        loaded.model,
        drafter,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        walk=walk,
        lossless=lossy is None,
    )
