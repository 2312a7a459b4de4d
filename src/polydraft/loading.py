"""From names to a working decoder."""

import dataclasses

import torch

from polydraft.decision import DEFAULT_THRESHOLD, check_threshold, load_decision
from polydraft.drafters import LOSSY_DRAFTERS, GramTreeOptions, Parts, make_drafter
from polydraft.drafters.choice import check_drafter, needs_draft
from polydraft.engine import Decoder
from polydraft.errors import UsageError, unknown_name
from polydraft.models.bundled import BUNDLED
from polydraft.models.inflated import source_name
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import check_device_map, resolve_device, resolve_dtype
from polydraft.papers.target_init import check_lossy
from polydraft.sampling import check_draft_temperature
from polydraft.schemes import SCHEMES
from polydraft.trees import DynamicShape, Topology, parse_dynamic, parse_tree
from polydraft.walks import check_walk

DEFAULT_TREE = "4x2x2x1x1"
DEFAULT_PAIRS = {BUNDLED: ("smollm2-head", "dynamic:64")}
"""Draft and tree that ``"auto"`` means for a target. Other targets decode plainly until they are given a draft."""
FLAT_BLOCKS = "flat-blocks"
NARROW_TREE = "dynamic:16"
"""The tree of such a pair on a CPU in float32, where every node costs: drafting hardly pays there, so it mostly rests."""
STATIC_TREE, NARROW_STATIC_TREE = "4x2x1", "chain:3"
"""Trees of such a pair on a CPU where a scheme, a walk, a drafter or a lossy rule is asked for; the second in float32, and for
schemes of few children."""
_WIDEST_STATIC = 4


def usual_pair(target: str) -> tuple[str, str]:
    """Return draft and tree that ``"auto"`` means for a target."""
    return DEFAULT_PAIRS.get(source_name(target), ("none", DEFAULT_TREE))


def load(
    target: str = BUNDLED,
    draft: str = "auto",
    *,
    drafter: str = "auto",
    tree: str = "auto",
    scheme: str = "auto",
    walk: str = "auto",
    draft_temperature: float | None = None,
    decision: str | None = None,
    stop_below: float = DEFAULT_THRESHOLD,
    lossy: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    graphs: bool = True,
    compiled: bool = False,
    device_map: str | None = None,
    grams: GramTreeOptions | None = None,
    lossless: bool = True,
) -> Decoder:
    """Load a target and a draft and return the decoder.

    Parameters
    ----------
    target : str
        ``"smollm2"`` (bundled), a folder with a Hugging Face model, or a hub name; ``"inflated:7b"`` (1b, 13b) for the
        bundled model at a large one's cost.
    draft : str
        A folder or hub name of a model with the same tokens, ``"early-exit:k"`` for the target's own first k layers,
        ``"none"`` for plain decoding, or ``"auto"``.
    drafter : str
        Who proposes: ``"auto"`` (the draft), ``"model"`` (the same, as a part of a combination), or n-grams, which need no
        draft: ``"self-draft"``, ``"ngram"``, ``"lookup"``, ``"suffix"``, ``"corpus"``; any of them joined by ``+``.
    tree : str
        Shape of the draft tree, see `polydraft.trees.parse_tree`, or ``"dynamic:NODES:DEPTH"`` for one that is chosen anew in
        every round, see `polydraft.trees.parse_dynamic`; ``"auto"`` is ``"4x2x2x1x1"``, or, with the draft
        that ``draft="auto"`` picked and no GPU, a dynamic one, or a small one where scheme, walk, drafter or lossy are given.
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
        A rule that changes the law of the text, by name: ``"target-init"`` or ``"flat-blocks"``. Never chosen otherwise.
    device, dtype : str
        ``"auto"`` picks a GPU if there is one, and bfloat16 where the hardware computes in it. ``"int8"``, on a CPU, quantises
        the target's weights; texts are then exact with respect to the quantised target.
    device_map : str, optional
        For a target larger than one device: ``"auto"`` and other maps of accelerate, or ``"tp"`` (tensor parallelism) in
        processes started by torchrun.
    graphs : bool
        On a GPU, replay whole rounds as CUDA graphs.
    compiled : bool
        On a GPU, compile drawing and verification: some 20 seconds at first, a millisecond less a round above temperature 0.
    grams : GramTreeOptions, optional
        Sizes and caches of n-gram drafters.
    lossless : bool
        False allows settings that change the law of the text, such as ``GramTreeOptions(flat_blocks=True)``.

    Returns
    -------
    Decoder
    """
    # Everything that can be checked without loading a model comes first: a typing error should not cost a minute.
    usual_draft, usual_tree = usual_pair(target)
    check_device_map(device_map, device)
    place = resolve_device(device)
    number_format = resolve_dtype(dtype, place)
    if tree == "auto":
        plain = scheme == walk == drafter == "auto" and lossy is None
        narrow = place.type == "cpu" and number_format is torch.float32 and target in DEFAULT_PAIRS
        # On a GPU a pass of 64 nodes costs little more than one of a single token.
        wide = draft != "auto" or place.type == "cuda"
        tree = DEFAULT_TREE if wide else NARROW_TREE if narrow else usual_tree
        if parse_dynamic(tree) is not None and not plain:
            tree = _static_tree(scheme, narrow)
    dynamic, topology = _parsed(tree, scheme)
    check_threshold(stop_below)
    grams = grams or GramTreeOptions()
    if lossy == FLAT_BLOCKS:
        grams, lossless, lossy = dataclasses.replace(grams, flat_blocks=True), False, None
    elif lossy is not None:
        _check_lossy_rule(lossy, tree, topology)
    if scheme != "auto":
        SCHEMES.get(scheme)
    check_walk(walk, scheme)
    check_drafter(drafter, walk)
    if grams.flat_blocks and lossless:
        raise UsageError("flat_blocks changes the law of the text above temperature 0; pass lossless=False to have it anyway")
    draft = _needed_draft(draft, drafter, usual_draft)
    check_draft_temperature(draft_temperature)
    loaded = load_model(target, place, number_format, device_map)
    draft_model = load_draft(draft, loaded)
    if decision is not None and draft_model is None:
        raise UsageError("a decision model needs a draft; pass draft=NAME, a folder, or early-exit:k")
    parts = Parts(
        target=loaded.model,
        draft=draft_model,
        topology=topology,
        scheme=scheme,
        draft_temperature=draft_temperature,
        grams=grams.for_tokenizer(loaded.tokenizer),
        dynamic=dynamic,
        decision=load_decision(decision, draft_model, stop_below) if decision is not None and draft_model is not None else None,
    )
    return Decoder(
        loaded.model,
        make_drafter(parts, drafter) if lossy is None else LOSSY_DRAFTERS.get(lossy)(parts),
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        walk=walk,
        lossless=lossless and lossy is None,
        graphs=graphs,
        compiled=compiled,
    )


def _static_tree(scheme: str, narrow: bool) -> str:
    """Return the tree of a pair where something is asked for that dynamic trees do not have."""
    most = None if scheme == "auto" else SCHEMES.get(scheme).max_children
    return NARROW_STATIC_TREE if narrow or (most is not None and most < _WIDEST_STATIC) else STATIC_TREE


def _parsed(tree: str, scheme: str) -> tuple[DynamicShape | None, Topology]:
    """Return what bounds a tree that is chosen anew in every round, or None, and the shape of one that is not."""
    dynamic = parse_dynamic(tree)
    if dynamic is None:
        return None, parse_tree(tree)
    if scheme != "auto":
        raise UsageError(f"scheme {scheme!r} with tree {tree!r}; allowed: auto, because dynamic trees choose their own")
    return dynamic, Topology()


def _check_lossy_rule(lossy: str, tree: str, topology: Topology) -> None:
    """Refuse unknown rules, and trees that a rule cannot grow."""
    if lossy not in LOSSY_DRAFTERS:
        raise unknown_name("lossy rule", lossy, [*LOSSY_DRAFTERS, FLAT_BLOCKS])
    if parse_dynamic(tree) is not None:
        raise UsageError(f"--lossy {lossy} grows forks only, not tree {tree}; use a tree such as fork:16x5")
    check_lossy(lossy, topology)


def _needed_draft(draft: str, drafter: str, usual: str) -> str:
    """Return the draft to load, ``"none"`` for drafters that use none."""
    if needs_draft(drafter):
        return usual if draft == "auto" else draft
    if draft not in ("auto", "none"):
        raise UsageError(
            f"drafter {drafter!r} uses no draft, but draft={draft!r} is given; use {drafter}+model, or leave it out"
        )
    return "none"
