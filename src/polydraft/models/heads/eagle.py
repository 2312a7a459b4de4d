"""Heads of EAGLE's first two papers, in the authors' format. EAGLE-2 changed the trees, not the heads.

`fc` joins a token's embedding and the target's last hidden states before it to one vector. One transformer layer follows, whose
only norm is that of the MLP's input. Its outputs replace hidden states and go to the target's own output table.

References
----------
.. [1] Li et al. 2024, EAGLE, arXiv:2401.15077.
.. [2] Li et al. 2024, EAGLE-2, arXiv:2406.16858.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from polydraft.models.heads.eagle3 import Config, Format
from polydraft.models.heads.feature_head import HeadShape
from polydraft.models.heads.foreign_tensors import FIRST, layer_shapes, layer_weights
from polydraft.models.heads.head_folder import Target

_NAMES = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "EagleLlamaForCausalLM", "EagleQwen2ForCausalLM")
"""Architectures of such heads in the configs of other engines."""


class EagleFormat(Format):
    """A layer of Llama's or Qwen2's form without norms around it."""

    kind = "eagle"

    def recognise(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a head.

        The authors' own configs describe a language model of one layer. The key `bias`, which is about `fc`, tells some of them
        apart from real models.
        """
        names = config.get("architectures")
        named = isinstance(names, list) and any(name in _NAMES for name in names)
        marked = "bias" in config and config.get("num_hidden_layers") == 1 and config.get("model_type") in ("llama", "qwen2")
        return (named or marked) and "speculators_model_type" not in config and "draft_vocab_size" not in config

    def _of_authors(self, config: Mapping[str, Any]) -> Config:
        """Read a config, which describes only the layer."""
        return Config(layer=config, form={self.taps: [1]})  # any value will do: `shape` removes it

    def _shape(self, config: Config, target: Target, found: set[str]) -> HeadShape:
        shape = super()._shape(config, target, found)
        return dataclasses.replace(shape, taps=(), reads_last=True, joins=True, normed=False, join_bias="fc.bias" in found)

    def _ignored(self, config: Config, tokens: int) -> Collection[str]:
        return ("lm_head.weight",)

    def _expected(self, config: Config, shape: HeadShape, tokens: int) -> dict[str, tuple[int, ...]]:
        size = shape.hidden_size
        expected = {"fc.weight": (size, 2 * size), **layer_shapes(shape, FIRST, size), "embed_tokens.weight": (tokens, size)}
        del expected[f"{FIRST}input_layernorm.weight"]
        return expected | ({"fc.bias": (size,)} if shape.join_bias else {})

    def _renamed(self, theirs: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
        """Return the weights of a head under our names; we join features first, then tokens."""
        ours = {"join.weight": theirs["fc.weight"].roll(shape.hidden_size, 1), **layer_weights(theirs, shape, FIRST)}
        return ours | ({"join.bias": theirs["fc.bias"]} if shape.join_bias else {})


EAGLE = EagleFormat()
