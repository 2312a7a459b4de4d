"""polydraft inside Hugging Face `generate`: the same call and the same distribution, with several tokens per pass."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor

import polydraft.papers  # noqa: F401 - Self-Draft's branches
from polydraft.defaults import NONE, asked_for, default_draft, default_tree
from polydraft.described import documented, made_from
from polydraft.devices import dtype_name, is_host
from polydraft.draft import GRAM_DRAFTERS, Drafter, GramTreeOptions, Parts, make_drafter
from polydraft.draft.tree_drafter import check_drafter, split_drafter
from polydraft.engine import Decoder, Engine, Stats, StopReason, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.errors import UsageError
from polydraft.loading import default_decoder
from polydraft.models import Head, LanguageModel, check_prompts
from polydraft.models.adapters import places_of
from polydraft.models.families import text_config
from polydraft.models.generation_defaults import sampling_params
from polydraft.models.given import check_draft, given_draft
from polydraft.models.hf import HFModel, in_training
from polydraft.models.loading import Loaded, load_draft
from polydraft.options import AUTO, TreeOptions
from polydraft.sampling import RowParams, SamplingParams
from polydraft.sampling.categorical import row_seed
from polydraft.trees import DynamicShape, Topology

_OFF = (None, False)
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (None, 1)),
    "cache_implementation": (None, "dynamic"),
    "use_cache": (None, True),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states", "token_healing"), _OFF),
    **dict.fromkeys(("constraints", "force_words_ids", "penalty_alpha", "dola_layers", "low_memory", "is_assistant"), _OFF),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type", "use_mtp"), _OFF),
    **dict.fromkeys(("cache_config", "max_cache_len", "compile_config"), _OFF),
}
"""Unsupported settings of `generate`, each with the values that turn it off."""
# Processors that keep state between calls, or run a model, would be confused by calls for the nodes of a tree.
_REMEMBERING = ("ClassifierFreeGuidance", "SynthIDText", "Whisper", "AlternatingCodebooks", "BarkEos", "Dia")
# Arguments that `generate` itself prepares, or that are supported.
_PREPARED = (
    "attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep", "cache_position",
    "streamer",
)  # fmt: skip
# Processors of `transformers` that treat the rows of a batch differently.
_ROW_DEPENDENT = ("PrefixConstrained", "EncoderRepetitionPenalty", "EncoderNoRepeatNGram")


@dataclass(frozen=True, kw_only=True)
class SpeculateOptions(TreeOptions):
    """Options of `Speculate`."""

    draft: Any = field(default=AUTO, kw_only=False)
    """A small transformers model with the same tokenizer, on the same device; a `LanguageModel` or a `Head`; a name that
    `polydraft.load` takes, which is loaded for the first model it is used with; or None for plain decoding.

    ``"auto"`` means the same as for `load`: the known draft of the model, or else its own weights in int8, or n-grams; with
    `ngrams`, only those. For a draft given by name, tokenizers are compared if the model's is on this machine, else only
    the sizes of the vocabularies."""
    ngrams: str | None = None
    """Also draft from n-grams: self-draft, ngram, lookup, suffix, corpus, or several joined with +.

    A corpus cache must be named in `grams`; its tokenizer cannot be checked here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.draft, os.PathLike):
            object.__setattr__(self, "draft", os.fspath(self.draft))
        if self.ngrams is not None:
            check_drafter(self.ngrams, self.walk)
            if (other := split_drafter(self.ngrams)[1]) is not None:
                raise UsageError(
                    f"ngrams={self.ngrams!r} names {other!r}, which proposes no n-grams; allowed: {', '.join(GRAM_DRAFTERS)}"
                )
        if self.grams is not None and self.grams.flat_blocks:
            raise UsageError("flat_blocks changes the distribution of the text, which Speculate never does; leave it out")

    def shape_for(self, draft: LanguageModel | Head | None) -> tuple[DynamicShape | None, Topology]:
        """Return limits of a dynamic tree, and the shape of a static one; ``"auto"`` means the same as for `polydraft.load`."""
        if draft is None:
            return None, Topology()
        tree = self.tree
        if tree == AUTO:
            dtype = dtype_name(getattr(draft, "dtype", torch.float32))
            asked = asked_for(self.tree_scheme, self.walk, drafter="model")  # one tree for all temperatures
            tree = default_tree(gpu=not is_host(draft.device), dtype=dtype, asked=asked)
        return replace(self, tree=tree).shape


@documented(SpeculateOptions)
class Speculate:
    """A decoding method for `model.generate(..., custom_generate=Speculate(...))`.

    The text is what `generate` alone would give: identical for ``do_sample=False``, equal in distribution otherwise.

    Notes
    -----
    Logits processors other than temperature, top-k, top-p, min-p and repetition penalty are called for one row at a time, with
    the arguments that plain `generate` would pass, padding and row number included.
    A processor must depend only on its arguments. It is never called after an end-of-text token, a stop string or the last
    token, but may be called beyond the end that your own stopping criterion sets, as far as a tree reaches.
    `generate` does not pass on its `tokenizer` argument: instead of ``stop_strings=``, use
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``.

    Examples
    --------
    >>> speculate = Speculate(draft=small_model, tree="4x2x2x1x1")                       # doctest: +SKIP
    >>> model.generate(**inputs, max_new_tokens=64, custom_generate=speculate)           # doctest: +SKIP
    """

    @made_from(SpeculateOptions)
    def __init__(self, options: SpeculateOptions) -> None:
        self.stats: tuple[Stats, ...] = ()
        """Statistics of the last call."""
        self._target: HFModel | None = None
        self._places: tuple[int, ...] = ()
        self._options = options
        named = isinstance(options.draft, str)  # to be loaded once the target is known
        self._draft_by(None if named or options.draft is None else given_draft(options.draft))

    def _draft_by(self, draft: LanguageModel | Head | None) -> None:
        """Make the drafter for a draft, or without one."""
        options = self._options
        dynamic, topology = options.shape_for(draft)
        draws = dynamic is not None or topology.depth > 0
        self._draft: LanguageModel | Head | None = draft if draws else None
        parts = Parts(
            draft=self._draft,
            topology=topology,
            scheme=options.tree_scheme,
            draft_temperature=options.draft_temperature,
            grams=options.grams or GramTreeOptions(),
            dynamic=dynamic,
            pauses=options.tree == AUTO,
        )
        name = AUTO if options.ngrams is None else f"{options.ngrams}+model" if draws else options.ngrams
        self._drafter: Drafter = make_drafter(parts, name)

    def _draft_by_name(self, name: str, loaded: Loaded) -> None:
        """Load a draft for a target, and make the drafter; ``"auto"`` chooses as `load` does."""
        options, target = self._options, loaded.model
        if name == AUTO:
            name = NONE if options.ngrams is not None else default_draft(target.name)
            all_open = options.tree == options.tree_scheme == options.walk == AUTO and options.draft_temperature is None
            if name == NONE and options.ngrams is None and all_open:
                self._draft, self._drafter = None, default_decoder(loaded, None, target.name).drafter
                return
        self._draft_by(load_draft(name, loaded))

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; `generate` calls this with prepared arguments, and returns the result."""
        target = self._wrapped(model)
        dropped = _dropped_arguments()
        asked = {name: value for name, value in {**model_kwargs, **dropped}.items() if not _tells_of_text(model, name, value)}
        _refuse(generation_config, logits_processor, asked, model.generation_config)
        streamer = dropped.get("streamer") if streamer is None else streamer
        paddings, prompts = _split_padding(input_ids, model_kwargs)
        check_prompts(prompts, target.max_positions, target.vocab_size)
        max_new_tokens = stopping_criteria.max_length - input_ids.shape[1]
        _check_room(target, max(map(len, prompts)), max_new_tokens)
        params, others = sampling_params(logits_processor, bool(generation_config.do_sample), any(paddings))
        apart = bool(others) and (len(prompts) > 1 or any(paddings))
        seed = int(torch.randint(2**62, (1,))) if generation_config.do_sample else 0
        eos_criteria = [one for one in stopping_criteria if type(one) is transformers.EosTokenCriteria]
        ends = [token for one in eos_criteria for token in one.eos_token_id.flatten().tolist()]
        # Without end-of-text tokens, `generate` extends all rows of a batch until the last one has ended.
        stops_after = _stop_strings(stopping_criteria, target.device) if ends or len(prompts) == 1 else None
        decoder, sequences = Decoder(target, self._drafter, eos_token_ids=ends, coupled=self._options.couples), []
        for row, prompt in enumerate(prompts):
            # Other processors may depend on padding and row numbers, so each row has its own.
            bound = [_RowProcessor(other, paddings[row], row, len(prompts)) for other in others] if apart else others
            sequences.append(
                decoder.sequence(
                    prompt,
                    SamplingParams(**params, processors=tuple(bound)),
                    seed=row_seed(seed, row),
                    max_new_tokens=max_new_tokens,
                    row=row,
                    stops_after=stops_after,
                )
            )
        workspace = Workspace(target, self._drafter, RowParams(tuple(sequence.params for sequence in sequences)))
        engine = Engine(workspace, walk=self._options.walk, sequences=sequences)
        output_ids = _decode(engine, sequences, input_ids, stopping_criteria, generation_config, streamer)
        self.stats = (engine.stats,)
        if generation_config.return_dict_in_generate:
            return transformers.generation.GenerateDecoderOnlyOutput(sequences=output_ids)
        return output_ids

    def _wrapped(self, model: Any) -> HFModel:
        """Return the target as a `LanguageModel`: the one of the last call, if the model has not changed since."""
        if model.training:
            raise in_training("model")
        target, name = self._target, self._options.draft
        if target is None or target.hf_model is not model or self._places != places_of(model.parameters()):
            target = HFModel(model, endless=True)
            if isinstance(name, str):
                self._draft_by_name(name, Loaded(target, _tokenizer_of(model), ()))
            elif isinstance(self._draft, Head):
                target.tap(self._draft.taps)
            self._target, self._places = target, places_of(model.parameters())
        if self._draft is not None:
            check_draft(self._draft, target)
        return target


def _tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a model, if it is on this machine; else None."""
    try:
        return transformers.AutoTokenizer.from_pretrained(model.config.name_or_path, local_files_only=True)
    except Exception:  # no name, no files, or unreadable ones: the caller can do without
        return None


def _decode(
    engine: Engine,
    sequences: Sequence[TokenSequence],
    input_ids: Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
) -> Tensor:
    """Hand out one token per row at a time, so that criteria and streamers see plain decoding."""
    ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    tokens: list[list[int]] = [[] for _ in input_ids]
    unfinished = [True] * len(tokens)
    step = -1
    while any(unfinished):
        step += 1
        while any(not sequence.done and len(tokens[sequence.row]) <= step for sequence in sequences):
            for emitted in engine.step():
                tokens[emitted.row].extend(emitted.token_ids)
        short = [row for row, going in enumerate(unfinished) if going and len(tokens[row]) <= step]
        assert not short, "a row ended before it was told to"
        column = [row_tokens[step] if len(row_tokens) > step else _padding(generation_config) for row_tokens in tokens]
        column_B = torch.tensor(column, device=input_ids.device)
        input_ids = torch.cat([input_ids, column_B[:, None]], dim=1)
        done = torch.as_tensor(stopping_criteria(input_ids, None)).expand(len(column)).tolist()
        unfinished = [going and not stop for going, stop in zip(unfinished, done, strict=True)]
        # Without end-of-text tokens, `generate` extends finished rows until all are finished, and so does this.
        ended = [not going and (ends_rows or not any(unfinished)) for going in unfinished]
        for sequence in sequences:
            if ended[sequence.row] and (not sequence.done or len(tokens[sequence.row]) > step + 1):
                engine.end(sequence, StopReason.STOP, step + 1)
                del tokens[sequence.row][step + 1 :]
        if streamer is not None:
            streamer.put(column_B.cpu())
    if streamer is not None:
        streamer.end()
    return input_ids


def _stop_strings(stopping_criteria: Any, device: torch.device) -> Callable[[Sequence[int]], bool] | None:
    """Return a function that tells whether a stop string ends a text. Other criteria may keep state, so they are left out."""
    known = transformers.StopStringCriteria.__call__
    found = [one for one in stopping_criteria if type(one).__call__ is known]
    if not found:
        return None
    return lambda text: any(bool(one(torch.tensor([text], device=device), None).any()) for one in found)


def _check_room(target: HFModel, longest: int, max_new_tokens: int) -> None:
    """Refuse, before the first token, a text that may outgrow the model's positions."""
    positions = target.max_positions
    if positions is not None and longest + max_new_tokens > positions:
        raise UsageError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit the model's context of {positions}; "
            f"set max_new_tokens to at most {positions - longest}"
        )


def _padding(generation_config: Any) -> int:
    token = generation_config._pad_token_tensor
    if token is None:
        raise UsageError("a text ended before the others of its batch and pad_token_id is not set; pass pad_token_id=...")
    return int(token)


def _dropped_arguments() -> dict[str, Any]:
    """Return arguments of `generate` that transformers (5.22) does not pass on.

    They are read from the caller's variables, which is better than to ignore silently what the user asked for.
    """
    code = inspect.unwrap(transformers.GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    names = ("streamer", "assistant_model", "synced_gpus")
    return {} if frame is None else {name: frame.f_locals.get(name) for name in names}


def _refuse(config: Any, processors: Sequence[Any], arguments: dict[str, Any], usual: Any) -> None:
    """Raise a `UsageError` that names the first unsupported setting; `usual` is the model's own generation config."""
    asked = {name: getattr(config, name, None) for name in _HARMLESS}
    if asked["use_cache"] == usual.use_cache:  # MPT turns it off, which takes time but changes no text
        del asked["use_cache"]
    refused = [f"{name}={value!r}" for name, value in asked.items() if value not in _HARMLESS[name]]
    for name, value in arguments.items():
        prepared = name in _PREPARED and not getattr(value, "_is_user_defined", False)
        # `generate` adds empty collections (of images, say) of its own.
        nothing = value is None or value is False or (isinstance(value, dict | list | tuple) and not value)
        if not (prepared or nothing):
            refused.append(name)
    names = [type(processor).__name__ for processor in processors]
    refused += [f"{name}, which remembers earlier calls," for name in names if any(word in name for word in _REMEMBERING)]
    if refused:
        raise UsageError(f"{refused[0]} does not work with custom_generate=Speculate(...); leave it out")


def _tells_of_text(model: Any, name: str, value: Any) -> bool:
    """Whether an argument only says that all tokens are text, as processors of multimodal models do."""
    kinds = ("mm_token_type_ids", *(("token_type_ids",) if text_config(model) is not model.config else ()))
    return name in kinds and isinstance(value, Tensor) and not bool(value.any())


def _split_padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Cut off the padding at the left of each row; return paddings and texts."""
    mask_BL = model_kwargs.get("attention_mask")
    mask_BL = torch.ones_like(input_ids) if mask_BL is None else mask_BL.long()
    if mask_BL.shape != input_ids.shape or not mask_BL.equal(mask_BL.cummax(dim=1).values):
        raise UsageError("attention_mask hides tokens in the middle or at the end; allowed: padding on the left only")
    positions_BL = model_kwargs.get("position_ids")
    expected_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
    # Multimodal models have several positions per token; for text, all of them are the same.
    if positions_BL is not None and not ((positions_BL == expected_BL) | (mask_BL == 0)).all():
        raise UsageError("position_ids other than 0, 1, 2, ... do not work with custom_generate=Speculate(...); leave them out")
    pairs = list(zip(input_ids.tolist(), (mask_BL == 0).sum(dim=1).tolist(), strict=True))
    return [row[:cut] for row, cut in pairs], [row[cut:] for row, cut in pairs]


class _RowProcessor:
    """A logits processor for one row of a batch: it sees the row's padding, and its number if the processor depends on it."""

    def __init__(self, processor: Any, padding: list[int], row: int, rows: int) -> None:
        self._processor, self._padding, self._row = processor, padding, row
        name, module = type(processor).__name__, type(processor).__module__
        alike = module.startswith("transformers.") and not name.startswith(_ROW_DEPENDENT)
        self._rows = 1 if alike else rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process one text's scores `[1, V]`."""
        padding_1P = input_ids.new_tensor([self._padding])
        ids_BL = torch.cat([padding_1P, input_ids], dim=1).expand(self._rows, -1)
        scores_BV = self._processor(ids_BL, scores.expand(self._rows, -1).clone())
        row = self._row if self._rows > 1 else 0
        return scores_BV[row : row + 1]  # type: ignore[no-any-return]
