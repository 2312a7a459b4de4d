"""Folders of P-EAGLE and DFlash heads, in the format of vLLM's speculators or, for DFlash, of its authors."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from polydraft.errors import shown
from polydraft.models.heads.eagle3 import Config, Format, layer_windows
from polydraft.models.heads.foreign_tensors import layer_weights
from polydraft.models.heads.head_folder import Target, checked_number
from polydraft.models.heads.parallel_head import DFlashHead, ParallelShape, PEagleHead

_MOST_LEVELS = 64


class ParallelFormat(Format):
    """The common part of P-EAGLE and DFlash: several layers, and a mask token for future positions."""

    one_layer = False

    def recognise(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a head."""
        return config.get("speculators_model_type") == self.kind

    def _shape(self, config: Config, target: Target, found: set[str]) -> ParallelShape:
        base = vars(super()._shape(config, target, found))
        own = {
            "normed_output": False,  # outputs never replace features here: the norm belongs to the output table
            "mask_token": checked_number("mask_token_id", config.form.get("mask_token_id"), 0, target.vocab_size - 1),
            "layer_windows": layer_windows(config),
            **self._levels(config.form),
        }
        return ParallelShape(**{**base, **own})

    @abstractmethod
    def _levels(self, form: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return how many levels a pass drafts, and how its places see each other."""

    def _renamed(self, theirs: Mapping[str, Tensor], shape: Any) -> dict[str, Tensor]:
        ours = super()._renamed(theirs, shape)
        for number in range(1, len(shape.layer_windows)):
            layer = f"layers.{number}."
            own = {"attention_norm.weight": theirs[f"{layer}input_layernorm.weight"], **layer_weights(theirs, shape, layer)}
            ours |= {f"upper.{number - 1}.{name}": weight for name, weight in own.items()}
        return ours


class PEagleFormat(ParallelFormat):
    """EAGLE-3's layer with more layers above it, and learned features for future tokens."""

    kind, head = "peagle", PEagleHead

    def _levels(self, form: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return how many levels were trained: as many as the default proposal method drafts."""
        said = form["speculators_config"]
        usual = [one for one in said["proposal_methods"] if one["proposal_type"] == said["default_proposal_method"]]
        levels = usual[0]["speculative_tokens"] if usual else None
        return {"depths": checked_number("speculative_tokens", levels, most=_MOST_LEVELS)}

    def _expected(self, config: Config, shape: Any, tokens: int) -> dict[str, tuple[int, ...]]:
        return super()._expected(config, shape, tokens) | {"mask_hidden": (1, 1, shape.hidden_size * len(shape.taps))}

    def _renamed(self, theirs: Mapping[str, Tensor], shape: Any) -> dict[str, Tensor]:
        return super()._renamed(theirs, shape) | {"mask_F": theirs["mask_hidden"].flatten()}


class DFlashFormat(ParallelFormat):
    """Layers of Qwen3's form, and a norm of the features that all of them use as keys and values."""

    kind, head = "dflash", DFlashHead
    taps, feature_norm = "aux_hidden_state_layer_ids", "hidden_norm.weight"

    def recognise(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a head."""
        return super().recognise(config) or isinstance(config.get("dflash_config"), dict)

    def _of_authors(self, config: Mapping[str, Any]) -> Config:
        """Read a config in the authors' own format, which counts the target's layers from 0."""
        own = config["dflash_config"]
        return Config(layer=config, form={**config, **own, self.taps: [tap + 1 for tap in own["target_layer_ids"]]})

    def _shape(self, config: Config, target: Target, found: set[str]) -> ParallelShape:
        """Return sizes and form; queries and keys are always normed."""
        return super()._shape(config, target, found | {"layers.0.self_attn.q_norm.weight"})

    def _levels(self, form: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return how many levels a block drafts, and what its places see."""
        flags = {name: form.get(name, False) for name in ("sample_from_anchor", "sliding_window_non_causal")}
        if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
            raise ValueError(f"{wrong[0]} is {shown(flags[wrong[0]])}, not true or false")
        root_drafts, sees_all = flags.values()
        most = _MOST_LEVELS + (not root_drafts)
        size = checked_number("block_size", form.get("block_size"), 1 + (not root_drafts), most)
        return {"depths": size - (not root_drafts), "root_drafts": root_drafts, "causal_windows": not sees_all}

    def _ignored(self, config: Config, tokens: int) -> Collection[str]:
        """Return the names of tensors to ignore: the input table, and the output table unless the vocabulary is partial."""
        return ("embed_tokens.weight", *(("lm_head.weight",) if config.drafted(tokens) == tokens else ()))

    def _expected(self, config: Config, shape: Any, tokens: int) -> dict[str, tuple[int, ...]]:
        ignored = self._ignored(config, tokens)
        return {name: size for name, size in super()._expected(config, shape, tokens).items() if name not in ignored}


PEAGLE, DFLASH = PEagleFormat(), DFlashFormat()
