"""Defaults from a checkpoint's generation_config.json, and `transformers` logits processors as sampling parameters."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers

from polydraft.sampling import SamplingParams, was_asked

_NUMBERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields that `SamplingParams` has too, with their neutral values."""
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Fields that matter only if tokens are sampled."""
_FOLLOWED: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in _NUMBERS.items()},
    **dict.fromkeys(("typical_p", "top_h"), (1.0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length", "min_new_tokens"), (0, 0.0)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("sequence_bias",), ([], {})),
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_bos_token_id"), ()),
}
"""Fields that we follow, each with its neutral values; None is always neutral."""
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1, 1.0)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), (0, 0.0)),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers", "stop_strings"), ([],)),
    **dict.fromkeys(("watermarking_config", "forced_eos_token_id", "max_time"), ()),
    "token_healing": (False,),
}
"""Fields that change the text but are not followed. Other ways to decode (beams, contrastive search, guidance) must be
requested in the call; the others depend on limits that a request sets."""
_FIELDS = {
    transformers.RepetitionPenaltyLogitsProcessor: (0, "repetition_penalty", "penalty"),
    transformers.TemperatureLogitsWarper: (2, "temperature", "temperature"),
    transformers.TopKLogitsWarper: (3, "top_k", "top_k"),
    transformers.TopPLogitsWarper: (4, "top_p", "top_p"),
    transformers.MinPLogitsWarper: (5, "min_p", "min_p"),
}
"""Processors that `SamplingParams` covers: position in its order (1 is for all others), field, and attribute of the value."""


class GenerationDefaults:
    """The settings of a model's generation config, used wherever the caller sets nothing.

    Parameters
    ----------
    model : transformers model
    eos_token_ids : sequence of int
        Tokens that end a text.
    """

    def __init__(self, model: Any, eos_token_ids: Sequence[int]) -> None:
        self._model, self._eos = model, tuple(eos_token_ids)
        said = model.generation_config.to_dict()
        self.sampled = bool(said.get("do_sample"))
        """Whether texts are sampled by default."""
        self.followed = {name: said[name] for name, off in _FOLLOWED.items() if said.get(name) not in (None, *off)}
        """Fields that are followed."""
        self.left_out = {name: said[name] for name, off in _LEFT_OUT.items() if said.get(name) not in (None, *off)}
        """Fields that are not followed, although they would change the text."""

    def __bool__(self) -> bool:
        return bool(self.followed) or self.sampled

    def __str__(self) -> str:
        """Describe in one line what is followed."""
        parts = ["sampling"] if self.sampled else []
        for name, value in self.followed.items():
            if self.sampled or name not in _SAMPLED:
                parts.append(f"{name} of {len(value)}" if isinstance(value, list | dict) else f"{name}={value}")
        return ", ".join(parts)

    def fill(self, params: SamplingParams, prompt_length: int, *, draws: bool = True) -> SamplingParams:
        """Return the parameters, with the model's defaults for those that the caller has not set.

        Parameters
        ----------
        params : SamplingParams
        prompt_length : int
            In tokens. Some bans hold only for the first new tokens.
        draws : bool
            False if the likeliest tokens are followed whatever the temperature is, as in beam search.
        """
        if not self:
            return params
        asked = {name: getattr(params, name) for name in _NUMBERS if was_asked(getattr(params, name))}
        config = transformers.GenerationConfig()
        for name, value in {**copy.deepcopy(self.followed), **asked}.items():  # the constructor would log comments on them
            setattr(config, name, value)
        usual = (config.temperature or 1.0) if self.sampled else params.temperature
        config.temperature = asked.get("temperature", usual)
        config.do_sample = draws and config.temperature > 0
        config.top_k = min(config.top_k or 0, self._model.get_input_embeddings().num_embeddings)
        bias = {**params.logit_bias, **self._bans(config)}
        device = self._model.device
        config._eos_token_tensor = torch.tensor(self._eos, device=device) if self._eos else None
        processors = self._model._get_logits_processor(
            config, input_ids_seq_length=prompt_length, logits_processor=list(params.processors), device=device
        )
        found, others = sampling_params(processors, config.do_sample, padded=False)
        numbers = {**_NUMBERS, **found, "temperature": found["temperature"] if draws else params.temperature}
        return replace(params, **numbers, logit_bias=bias, processors=tuple(others))

    def _bans(self, config: Any) -> dict[int, float]:
        """Remove bans of single tokens from a config and return them as biases, which need not look at the text."""
        words = config.bad_words_ids or []
        single = {token for token, *rest in words if not rest and token not in self._eos}
        config.bad_words_ids = [word for word in words if len(word) > 1] or None
        banned = single | set(config.suppress_tokens or [])
        config.suppress_tokens = None
        return dict.fromkeys(sorted(banned), -math.inf)


def sampling_params(processors: Sequence[Any], sample: bool, padded: bool) -> tuple[dict[str, Any], list[Any]]:
    """Translate the processors that `SamplingParams` covers, if they come in its order; also return the others.

    Processors apply a repetition penalty to padding too, so it is translated only if texts are not `padded`.
    """
    if processors and type(processors[-1]) is transformers.LogitNormalization:
        processors = processors[:-1]  # the warper normalises anyway
    params: dict[str, Any] = {"temperature": 1.0 if sample else 0.0}
    unchanged = (dict(params), list(processors))
    others: list[Any] = []
    last_rank = -1
    for processor in processors:
        rank, name, value = _translated(processor)
        if name == "repetition_penalty" and (padded or others):
            rank, name = 1, ""
        if rank < last_rank or (name and rank == last_rank):
            return unchanged
        last_rank = rank
        if not name:
            others.append(processor)
        elif name == "repetition_penalty" or sample:  # without sampling, the others cannot change which token is best
            params[name] = value
    return params, others


def _translated(processor: Any) -> tuple[int, str, Any]:
    """Return a processor's position in the order of `SamplingParams`, its field there (or ""), and the field's value."""
    rank, name, attribute = _FIELDS.get(type(processor), (1, "", ""))
    value = getattr(processor, attribute, None)
    unusual = getattr(processor, "prompt_ignore_length", None) or getattr(processor, "min_tokens_to_keep", 1) != 1
    if not value or unusual or getattr(processor, "filter_value", -math.inf) != -math.inf:
        return 1, "", None
    return rank, name, value
