"""Load models by name, and make a decoder of them."""

import dataclasses
import logging

import torch

import polydraft.papers  # noqa: F401 - registers lossy rules and the like
from polydraft.automatic import automatic_draft, leaves_drafting_open
from polydraft.defaults import NONE, asked_for, default_draft, default_tree
from polydraft.described import described_by
from polydraft.devices import dtype_name, is_host
from polydraft.draft import LOSSY_DRAFTERS, GramTreeOptions, Parts, make_drafter
from polydraft.draft.tree_drafter import needs_draft
from polydraft.engine import Decoder
from polydraft.errors import PolydraftError, UsageError
from polydraft.models import Head, LanguageModel
from polydraft.models.finding import check_draft_name
from polydraft.models.int8_copy import NAME as INT8
from polydraft.models.int8_copy import Int8Copy
from polydraft.models.loading import Loaded, load_draft, load_given, load_model
from polydraft.models.placement import DTYPES, TENSOR_PARALLEL, check_device_map, resolve_device, resolve_dtype
from polydraft.options import AUTO, BY_LOAD, FLAT_BLOCKS, SELF_DRAFT, LoadOptions
from polydraft.papers.decision import DecisionModel, load_decision
from polydraft.profile import tuned

logger = logging.getLogger(__name__)


@described_by(LoadOptions)
def load(options: LoadOptions) -> Decoder:
    """Load a target and its draft, and return a decoder.

    Returns
    -------
    Decoder

    See Also
    --------
    polydraft.LoadOptions : these options as a value, for `polydraft.loading.load_with`.
    """
    return load_with(options)


def load_with(options: LoadOptions, *, batch: int = 1, temperature: float | None = None) -> Decoder:
    """Load what the options say, as `load` does.

    Parameters
    ----------
    options : LoadOptions
    batch, temperature : int, float
        Expected batch size and temperature: they select the setting of a profile that ``"auto"`` stands for.
    """
    # Check everything that needs no model first: a typo should not cost a minute.
    options.check_used()
    check_device_map(options.device_map, options.device)
    asked, left_open = options, options.tree == AUTO
    if isinstance(options.target, str):
        options = resolved(options, batch=batch, temperature=temperature)
        place = resolve_device(options.device)
        number_format = resolve_dtype(options.dtype, place)
        if BY_LOAD in options.tree and options.device_map == TENSOR_PARALLEL:
            raise UsageError(
                f"--tree {options.tree} does not work with --device-map tp: each process times its own rounds, and all must "
                f"have the same tree; use --tree {options.tree.replace(BY_LOAD, '')}"
            )
        if isinstance(options.draft, str):
            check_draft_name(options.draft, options.target)
        others = options.device_map, options.native, options.invariant, options.adapter
        loaded = load_model(options.target, place, number_format, *others)
    else:
        loaded = load_given(options.target, options.tokenizer, options.native, options.invariant)
        _check_place(options, loaded)
        options = _resolved(options, loaded.model.device, loaded.model.dtype)
    _say_defaults(loaded, options.generation_config)
    draft: LanguageModel | Head | None = None
    try:
        if options.draft != AUTO:
            draft = load_draft(options.draft, loaded)
    except PolydraftError as error:  # such as a head that needs tables which are spread over devices
        if asked.draft != AUTO or not left_open:
            raise
        logger.info("%s has a head that cannot draft: %s", loaded.model.name, error)
        options = dataclasses.replace(options, draft=AUTO if leaves_drafting_open(asked) else NONE)
    if options.draft == AUTO:
        options, draft = automatic_draft(options, loaded)
    return make_decoder(options, loaded, draft, pauses=left_open and options.device_map != TENSOR_PARALLEL)


def resolved(options: LoadOptions, *, batch: int = 1, temperature: float | None = None) -> LoadOptions:
    """Return the options with the draft, tree and drafter that ``"auto"`` means on this machine.

    The draft stays ``"auto"`` if the target has no known draft and the options leave drafting open: `polydraft.automatic` then
    chooses by the target's size.
    """
    place = resolve_device(options.device)
    number_format = resolve_dtype(options.dtype, place)
    if leaves_drafting_open(options):
        draft = default_draft(options.target, options.draft)
        found = tuned(options, draft, place, number_format, batch=batch, temperature=temperature)
        if found is not None:
            draft = draft if needs_draft(found.drafter) else NONE
            options = dataclasses.replace(options, tree=found.tree, drafter=found.drafter, draft=draft)
    return _resolved(options, place, number_format)


def default_decoder(loaded: Loaded, draft: LanguageModel | Head | None, target: str) -> Decoder:
    """Make the decoder that `load` would make for a target and its known draft, if any, without a profile."""
    options = LoadOptions(target=target, draft=INT8 if isinstance(draft, Int8Copy) else "given")
    if draft is None:
        options, draft = automatic_draft(options, loaded)
    else:
        options = _resolved(options, loaded.model.device, loaded.model.dtype)
    return make_decoder(options, loaded, draft, pauses=True)


def make_decoder(options: LoadOptions, loaded: Loaded, draft: LanguageModel | Head | None, *, pauses: bool = False) -> Decoder:
    """Make a decoder of loaded models; what the options say about models and machines is ignored.

    `pauses` means that the tree is a default: on a CPU, drafting then pauses while it does not pay.
    """
    grams, lossy = options.grams or GramTreeOptions(), options.lossy
    if lossy in (FLAT_BLOCKS, SELF_DRAFT):
        printed = lossy == SELF_DRAFT
        grams, lossy = grams.as_printed() if printed else dataclasses.replace(grams, flat_blocks=True), None
    dynamic, topology = options.shape
    parts = Parts(
        draft=draft,
        topology=topology,
        scheme=options.tree_scheme,
        draft_temperature=options.draft_temperature,
        grams=grams.for_tokenizer(loaded.tokenizer),
        dynamic=dynamic,
        decision=_decision(options, draft),
        by_load=BY_LOAD in options.tree,
        alone=options.alone,
        pauses=pauses,
    )
    return Decoder(
        loaded.model,
        make_drafter(parts, options.drafter) if lossy is None else LOSSY_DRAFTERS.get(lossy)(parts),
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        defaults=loaded.defaults if options.generation_config else None,
        walk=options.walk,
        coupled=options.lossy is None and options.couples,
        lossless=options.lossless and options.lossy is None,
        graphs=options.graphs,
    )


def _check_place(options: LoadOptions, loaded: Loaded) -> None:
    """Refuse options for another device or number format than that of a loaded model."""
    device, dtype = loaded.model.device, loaded.model.dtype
    asked = device if options.device == AUTO else resolve_device(options.device)
    if asked.type != device.type or asked.index not in (None, device.index):
        raise UsageError(f"the target is on {device} already, not on {asked}; move it, or leave out device")
    if options.dtype != AUTO and DTYPES.get(options.dtype) != dtype:
        raise UsageError(
            f"the target is in {dtype_name(dtype)} already, not in {options.dtype}; pass its name instead, or leave out dtype"
        )


def _say_defaults(loaded: Loaded, follow: bool) -> None:
    """Log which of the checkpoint's own settings are the defaults of requests."""
    defaults = loaded.defaults
    if defaults is None or not follow:
        return
    if defaults:
        logger.info(
            "following generation_config.json of %s: %s (--no-generation-config turns this off)", loaded.model.name, defaults
        )
    if defaults.left_out:
        names = ", ".join(f"{name}={value}" for name, value in defaults.left_out.items())
        logger.info("not following %s in generation_config.json of %s: set it in the call", names, loaded.model.name)


def _resolved(options: LoadOptions, place: torch.device, number_format: torch.dtype) -> LoadOptions:
    """Resolve ``"auto"`` for draft and tree; the result is checked like given options."""
    tree, draft = options.tree, options.draft
    if tree == AUTO:
        tree = default_tree(
            gpu=not is_host(place),
            dtype=dtype_name(number_format),
            asked=asked_for(options.tree_scheme, options.walk, options.drafter, options.lossy),
            target=options.target,
            shared=options.device_map == TENSOR_PARALLEL,
            copy=draft == INT8,
        )
    if draft == AUTO:
        named = isinstance(options.target, str)
        draft = default_draft(options.target) if named and needs_draft(options.drafter) else NONE
        draft = AUTO if draft == NONE and leaves_drafting_open(options) else draft
    return dataclasses.replace(options, tree=tree, draft=draft)


def _decision(options: LoadOptions, draft: LanguageModel | Head | None) -> DecisionModel | None:
    """Load the decision model, if the options name one."""
    name = options.decision
    if name is None or name == "none":
        return None
    if draft is None:
        raise UsageError("a decision model needs a draft; pass draft=NAME, a folder, or early-exit:k")
    return load_decision(name, draft, options.stop_below)
