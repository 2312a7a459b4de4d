"""Llama-shaped models and feature heads on a CPU by compiled code: weights handed over to `polydraft.backends.native`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polydraft.backends.native import BodyWeights, LayerWeights, NativeBody, NativeProduct, Weight, kernels, quantised
from polydraft.models._bodies import LeanBody, LeanLayer
from polydraft.models.quantised import Int8Body, Int8Layer, Int8Linear

if TYPE_CHECKING:
    from polydraft.models.heads.feature_head import FeatureHead

_DTYPES = (torch.float32, torch.bfloat16)


def native_product(weight_FX: Tensor, bias_F: Tensor | None = None, int8: bool = False) -> NativeProduct | None:
    """Return products with a weight by compiled code, in int8 if asked for, or None where there is none for it."""
    fits = weight_FX.device.type == "cpu" and weight_FX.dtype in _DTYPES and weight_FX.stride(1) == 1
    library = kernels() if fits else None
    if library is None:
        return None
    return NativeProduct(library, quantised(weight_FX.detach(), bias_F) if int8 else Weight(weight_FX, bias_F))


def native_linear(layer: Any) -> NativeProduct | None:
    """Return the products of a layer by compiled code, or None where it is more than products (hooks, an adapter)."""
    if not _plain(layer):
        return None
    if type(layer) is Int8Linear:
        library = kernels()
        return None if library is None else NativeProduct(library, layer.int8())
    return native_product(layer.weight, layer.bias)


def _plain(layer: Any) -> bool:
    changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return not changed and (type(layer) is Int8Linear or (type(layer) is nn.Linear and type(layer.weight) is nn.Parameter))


def native_body(body: LeanBody | Int8Body | None, dtype: torch.dtype) -> NativeBody | None:
    """Return the compiled form of a lean body, or of one in int8, or None where it cannot run."""
    if body is None or dtype not in _DTYPES or body.embedding.weight.device.type != "cpu":
        return None
    first = body.layers[0]
    norms = [body.norm, *(norm for layer in body.layers for norm in (layer.input_norm, layer.mlp_norm))]
    same = (
        len({(layer.channels, layer.queries, layer.keys, layer.scale) for layer in body.layers}) == 1
        and len({norm.variance_epsilon for norm in norms}) == 1
        and all(_plain(part) for layer in body.layers if isinstance(layer, LeanLayer) for part in (layer.output, layer.down))
        and type(body.embedding) is nn.Embedding
        and {part.dtype for part in [body.embedding.weight, *(norm.weight for norm in norms)]} == {dtype}
        and first.channels % 2 == 0
    )
    library = kernels() if same else None
    if library is None:
        return None
    rotary = body.rotary

    def angles(count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos_1PC, sin_1PC = rotary(torch.empty(0), position_ids=torch.arange(count)[None])
        return cos_1PC[0], sin_1PC[0]

    return NativeBody(
        library,
        BodyWeights(
            layers=[_layer_weights(layer) for layer in body.layers],
            final_norm=body.norm.weight,
            embedding_VF=body.embedding.weight,
            queries=first.queries,
            keys=first.keys,
            channels=first.channels,
            scale=first.scale,
            epsilon=body.norm.variance_epsilon,
            angles=angles,
        ),
    )


def _layer_weights(layer: LeanLayer | Int8Layer) -> LayerWeights:
    norms = {"attention_norm": layer.input_norm.weight, "mlp_norm": layer.mlp_norm.weight}
    if isinstance(layer, Int8Layer):
        return LayerWeights(**norms, qkv=layer.qkv, output=layer.output, gate_up=layer.gate_up, down=layer.down)
    return LayerWeights(
        **norms,
        qkv=Weight(layer.qkv, layer.qkv_bias),
        output=_linear_weight(layer.output),
        gate_up=Weight(layer.gate_up, layer.gate_up_bias),
        down=_linear_weight(layer.down),
    )


def _linear_weight(layer: Any) -> Weight:
    return Weight(layer.weight, layer.bias)  # the parameters themselves: their data may move


def native_head(head: "FeatureHead", epsilon: float) -> NativeBody | None:
    """Return the compiled form of a feature head, or None where it cannot run."""
    if head.device.type != "cpu" or head.dtype not in _DTYPES or head.tables[0].dtype != head.dtype:
        return None
    if head.join is None or head.attention_norm is None or not head.shape.is_plain:
        return None
    library = kernels()
    if library is None:
        return None

    def angles(count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos_PC, _, sin_PC = head.angles(torch.arange(count), torch.float32).unbind(1)
        return cos_PC.repeat(1, 2), sin_PC.repeat(1, 2)

    def weight(layer: nn.Linear) -> Weight:
        return quantised(layer.weight.detach()) if head.int8 else Weight(layer.weight)

    layer = LayerWeights(
        attention_norm=head.attention_norm.weight,
        qkv=weight(head.qkv),
        output=weight(head.attention_output),
        mlp_norm=head.mlp_norm.weight,
        gate_up=weight(head.gate_up),
        down=weight(head.down),
    )
    shape = head.shape
    return NativeBody(
        library,
        BodyWeights(
            layers=[layer],
            final_norm=head.output_norm.weight,
            embedding_VF=head.tables[0],
            queries=shape.num_heads,
            keys=shape.num_key_heads,
            channels=shape.head_size,
            scale=shape.head_size**-0.5,
            epsilon=epsilon,
            angles=angles,
            feature_norm=head.feature_norm.weight,
            token_norm=head.token_norm.weight,
            join=weight(head.join),
        ),
    )
