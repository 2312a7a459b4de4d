"""From names to a working decoder."""

import dataclasses

import torch

from polydraft.decision import SHIPPED_DECISIONS, DecisionModel, load_decision
from polydraft.described import described_by
from polydraft.drafters import LOSSY_DRAFTERS, GramTreeOptions, Parts, make_drafter
from polydraft.drafters.tree_drafter import needs_draft
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.bundled import BUNDLED
from polydraft.models.inflated import source_name
from polydraft.models.loading import Loaded, load_draft, load_model
from polydraft.models.placement import TENSOR_PARALLEL, check_device_map, resolve_device, resolve_dtype
from polydraft.options import AUTO, BY_LOAD, FLAT_BLOCKS, IF_SHIPPED, LoadOptions
from polydraft.profile import tuned
from polydraft.schemes import SCHEMES
from polydraft.trees import parse_dynamic

DEFAULT_TREE = "4x2x2x1x1"
DEFAULT_PAIRS = {BUNDLED: ("smollm2-head", "dynamic:64")}
"""Draft and tree that ``"auto"`` means for a target. Other targets decode plainly until they are given a draft."""
NARROW_TREE = "dynamic:8"
"""The tree of such a pair on a CPU in float32 and int8, where a pass costs by its tokens once it has more than a few."""
GPU_TREE, SMALL_GPU_TREE = f"dynamic:64:7:fixed/{BY_LOAD}4x2x1x1x1", f"dynamic:32:6:fixed/{BY_LOAD}4x2x1x1x1"
"""Trees on a GPU, where a pass of 64 nodes costs little more than one of a single token; the second for the bundled model
itself, beside which levels of the draft are not cheap."""
STATIC_TREE, NARROW_STATIC_TREE = "4x2x1", "chain:3"
"""Trees of such a pair on a CPU where a scheme, a walk, a drafter or a lossy rule is asked for; the second in float32, and for
schemes of few children."""
_WIDEST_STATIC = 4


def usual_pair(target: str) -> tuple[str, str]:
    """Return draft and tree that ``"auto"`` means for a target."""
    return DEFAULT_PAIRS.get(source_name(target), ("none", DEFAULT_TREE))


@described_by(LoadOptions)
def load(options: LoadOptions) -> Decoder:
    """Load a target and a draft and return the decoder.

    Returns
    -------
    Decoder

    See Also
    --------
    polydraft.LoadOptions : the same as a value, for `polydraft.loading.load_with`.
    """
    return load_with(options)


def load_with(options: LoadOptions, *, batch: int = 1, temperature: float | None = None) -> Decoder:
    """Load what the options ask for, as `load` does.

    Parameters
    ----------
    options : LoadOptions
    batch, temperature : int, float
        What it is for: which of a profile's settings stands in for ``"auto"``.
    """
    # Everything that can be checked without loading a model comes first: a typing error should not cost a minute.
    check_device_map(options.device_map, options.device)
    place = resolve_device(options.device)
    number_format = resolve_dtype(options.dtype, place)
    options = _resolved(_tuned(options, place, number_format, batch, temperature), place, number_format)
    if BY_LOAD in options.tree and options.device_map == TENSOR_PARALLEL:
        raise UsageError(
            f"--tree {options.tree} does not work with --device-map tp: each process times its own rounds, and all must "
            f"have the same tree; use --tree {options.tree.replace(BY_LOAD, '')}"
        )
    loaded = load_model(options.target, place, number_format, options.device_map, options.native, options.invariant)
    return make_decoder(options, loaded, load_draft(options.draft, loaded))


def make_decoder(options: LoadOptions, loaded: Loaded, draft: LanguageModel | FeatureHead | None) -> Decoder:
    """Make a decoder of models that are there already; the options' own names of models and machines are not looked at."""
    grams, lossy = options.grams or GramTreeOptions(), options.lossy
    if lossy == FLAT_BLOCKS:
        grams, lossy = dataclasses.replace(grams, flat_blocks=True), None
    dynamic, topology = options.shape
    parts = Parts(
        target=loaded.model,
        draft=draft,
        topology=topology,
        scheme=options.scheme,
        draft_temperature=options.draft_temperature,
        grams=grams.for_tokenizer(loaded.tokenizer),
        dynamic=dynamic,
        decision=_decision(options, draft),
        by_load=BY_LOAD in options.tree,
        greedy=options.greedy,
    )
    return Decoder(
        loaded.model,
        make_drafter(parts, options.drafter) if lossy is None else LOSSY_DRAFTERS.get(lossy)(parts),
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        walk=options.walk,
        lossless=options.lossless and options.lossy is None,
        graphs=options.graphs,
        compiled=options.compiled,
    )


def _tuned(
    options: LoadOptions, place: torch.device, number_format: torch.dtype, batch: int, temperature: float | None
) -> LoadOptions:
    """Put what `polydraft tune` found in place of what was left open, where all of it was left open."""
    left_open = options.tree == options.scheme == options.walk == options.drafter == AUTO
    given = (options.lossy, options.decision, options.draft_temperature, options.device_map)
    if not left_open or any(one is not None for one in given):
        return options
    draft = usual_pair(options.target)[0] if options.draft == AUTO else options.draft
    found = tuned(options, draft, place, number_format, batch=batch, temperature=temperature)
    if found is None:
        return options
    return dataclasses.replace(
        options, tree=found.tree, drafter=found.drafter, draft=draft if needs_draft(found.drafter) else "none"
    )


def _resolved(options: LoadOptions, place: torch.device, number_format: torch.dtype) -> LoadOptions:
    """Put what ``"auto"`` means in place of draft and tree; they are checked as if they had been given."""
    usual_draft, usual_tree = usual_pair(options.target)
    tree, draft = options.tree, options.draft
    if tree == AUTO:
        plain = options.scheme == options.walk == options.drafter == AUTO and options.lossy is None
        narrow = place.type == "cpu" and number_format in (torch.float32, torch.int8) and options.target in DEFAULT_PAIRS
        if place.type == "cuda" and plain:
            tree = SMALL_GPU_TREE if options.target in DEFAULT_PAIRS else GPU_TREE
            if options.device_map == TENSOR_PARALLEL:  # no two processes would time rounds alike
                tree = tree.replace(BY_LOAD, "")
        elif draft != AUTO or place.type == "cuda":
            tree = DEFAULT_TREE
        else:
            tree = NARROW_TREE if narrow else usual_tree
            if parse_dynamic(tree) is not None and not plain:
                tree = _static_tree(options.scheme, narrow)
    if draft == AUTO:
        draft = usual_draft if needs_draft(options.drafter) else "none"
    return dataclasses.replace(options, tree=tree, draft=draft)


def _static_tree(scheme: str, narrow: bool) -> str:
    """Return the tree of a pair where something is asked for that dynamic trees do not have."""
    most = None if scheme == AUTO else SCHEMES.get(scheme).max_children
    return NARROW_STATIC_TREE if narrow or (most is not None and most < _WIDEST_STATIC) else STATIC_TREE


def _decision(options: LoadOptions, draft: LanguageModel | FeatureHead | None) -> DecisionModel | None:
    """Load the decision model that is asked for, if one is."""
    name = options.decision
    if name is None:
        return None
    if draft is None:
        raise UsageError("a decision model needs a draft; pass draft=NAME, a folder, or early-exit:k")
    if name == IF_SHIPPED and draft.name not in SHIPPED_DECISIONS:
        return None
    return load_decision(AUTO if name == IF_SHIPPED else name, draft, options.stop_below)
