"""Llama-shaped models and feature heads on a CPU: each pass is one call of compiled code."""

import torch
from torch import Tensor, nn

from polydraft.backends.native.arguments import FLOATS, Weight, quantised
from polydraft.backends.native.body import BodyWeights, LayerWeights, NativeBody, Rows
from polydraft.backends.native.build import kernels, library
from polydraft.models.bodies import FastBody, LeanBody, LeanLayer, fast_body, is_product
from polydraft.models.heads.feature_head import FeatureHead
from polydraft.models.heads.head_context import FastHead, HeadContext, fast_head, following
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.models.packed import PackedEmbedding
from polydraft.models.quantised import Int8Body, Int8Layer, Int8Weight, is_int8_llama
from polydraft.operations import implements
from polydraft.trees import Block, causal_block


class NativeModel(FastBody):
    """A model whose passes are compiled code."""

    def __init__(self, body: NativeBody) -> None:
        self.body, self.key_shape = body, body.key_shape

    def extend(self, context: HFContext, tokens_BT: Tensor, block: Block) -> Tensor | None:
        """Pass a block; None in training, or if the weights have changed."""
        if not _ready(self.body, context):
            return None
        assert max(context.lengths) + block.stop <= context.capacity, (context.lengths, block.stop, context.capacity)
        return self.body(tokens_BT, block, _rows(self.body, context), context.model.taps)


class NativeHead(FastHead):
    """A feature head whose passes are compiled code."""

    def __init__(self, body: NativeBody) -> None:
        self.body = body

    def read(
        self, context: HeadContext, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None
    ) -> Tensor | None:
        """Pass some entries; None in training, or if the weights have changed."""
        if not _ready(self.body, context):
            return None
        return self.body(tokens_BT, block, _rows(self.body, context), features_BTF=following(fused_BWH, parents))

    def store(self, context: HeadContext, tokens_BT: Tensor, fused_BTH: Tensor) -> bool:
        """Store the keys and values of entries; return False in training, or if the weights have changed."""
        if not _ready(self.body, context):
            return False
        block = causal_block(*tokens_BT.shape, context.device)
        self.body.store(tokens_BT, block, _rows(self.body, context), features_BTF=fused_BTH)
        return True


def _ready(body: NativeBody, context: HFContext | HeadContext) -> bool:
    """Whether compiled code can run the next pass; the weights are checked once per text."""
    if torch.is_grad_enabled() or not body.ready(sure=context.checked):
        return False
    context.checked = True
    return True


def _rows(body: NativeBody, context: HFContext | HeadContext) -> Rows:
    keys_LBHSC, values_LBHSC = context.cache.held(torch.empty(context.batch_size, dtype=body.dtype), *body.key_shape)
    return Rows(
        lengths_B=context.lengths_B,
        slot_positions_BS=context.positions_BS,
        keys_LBHSC=keys_LBHSC,
        values_LBHSC=values_LBHSC,
        window=context.window,
        max_positions=context.max_positions,
    )


def _supports_model(model: HFModel, invariant: bool) -> bool:
    body = model.hf_model.base_model
    lean = model.lean is not None
    if not lean and not is_int8_llama(model.hf_model):
        return False
    embedding, layers = body.embed_tokens, body.layers
    norms = [body.norm, *(norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm))]
    attentions = [layer.self_attn for layer in layers]
    sizes = {(one.head_dim, one.q_proj.out_features, one.k_proj.out_features, one.scaling) for one in attentions}
    return (
        model.native
        and model.steady_positions
        and model.dtype in FLOATS
        and body.norm.weight.is_cpu
        and len(sizes) == 1
        and len({norm.variance_epsilon for norm in norms}) == 1
        and (not lean or all(is_product(part) for layer in layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)))
        and type(embedding) in (nn.Embedding, PackedEmbedding)
        and {part.weight.dtype for part in norms} == {model.dtype}
        and _table_dtype(embedding) == model.dtype
        and attentions[0].head_dim % 2 == 0
        and kernels() is not None
    )


def _table_dtype(table: nn.Module) -> torch.dtype | None:
    found = table.dtype if isinstance(table, PackedEmbedding) else table.weight.dtype
    return found if isinstance(found, torch.dtype) else None


@implements(fast_body, "native", supports=_supports_model)
def native_model(model: HFModel, invariant: bool) -> NativeModel:
    """Return the compiled form of a lean body, or of one in int8."""
    body: LeanBody | Int8Body = model.lean or Int8Body(model.hf_model.base_model)
    first, rotary = body.layers[0], body.rotary

    def angles(count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos_1PC, sin_1PC = rotary(torch.empty(0), position_ids=torch.arange(count)[None])
        return cos_1PC[0], sin_1PC[0]

    weights = BodyWeights(
        layers=[_layer_weights(layer) for layer in body.layers],
        final_norm=body.norm.weight,
        embedding=body.embedding if isinstance(body.embedding, PackedEmbedding) else body.embedding.weight,
        queries=first.queries,
        keys=first.keys,
        channels=first.channels,
        scale=first.scale,
        epsilon=body.norm.variance_epsilon,
        angles=angles,
    )
    return NativeModel(NativeBody(library(), weights))


def _layer_weights(layer: LeanLayer | Int8Layer) -> LayerWeights:
    norms = {"attention_norm": layer.input_norm.weight, "mlp_norm": layer.mlp_norm.weight}
    if isinstance(layer, Int8Layer):
        return LayerWeights(
            **norms,
            qkv=_joint(layer.qkv, layer.qkv_bias),
            output=Weight.int8(layer.output),
            gate_up=_joint(layer.gate_up, layer.gate_up_bias),
            down=Weight.int8(layer.down),
        )
    return LayerWeights(
        **norms,
        qkv=Weight(layer.qkv, layer.qkv_bias),
        output=Weight(layer.output.weight, layer.output.bias),  # the parameters themselves, because their data may move
        gate_up=Weight(layer.gate_up, layer.gate_up_bias),
        down=Weight(layer.down.weight, layer.down.bias),
    )


def _joint(weight: Int8Weight, bias_F: Tensor | None) -> Weight:
    return Weight(weight.data_FX, bias_F, weight.scales_F, weight.num_inputs)


def _supports_head(head: FeatureHead) -> bool:
    shape = head.shape
    biased = shape.qkv_bias or shape.output_bias or shape.mlp_bias or shape.join_bias
    plain = shape.joins and shape.normed and shape.normed_output and not shape.query_key_norm and not biased
    fits = plain and head.native and head.down.weight.is_cpu and head.dtype in FLOATS and head.tables[0].dtype == head.dtype
    return fits and kernels() is not None


@implements(fast_head, "native", supports=_supports_head)
def native_head(head: FeatureHead) -> NativeHead:
    """Return the compiled form of a feature head; made once per head."""
    made = head.kept.get("native")
    if not isinstance(made, NativeHead):
        made = head.kept["native"] = NativeHead(_head_body(head))
    return made


def _head_body(head: FeatureHead) -> NativeBody:
    shape = head.shape
    assert head.join is not None and head.attention_norm is not None

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
    weights = BodyWeights(
        layers=[layer],
        final_norm=head.output_norm.weight,
        embedding=head.tables[0],
        queries=shape.num_heads,
        keys=shape.num_key_heads,
        channels=shape.head_size,
        scale=shape.head_size**-0.5,
        epsilon=shape.norm_epsilon,
        angles=angles,
        feature_norm=head.feature_norm.weight,
        token_norm=head.token_norm.weight,
        join=weight(head.join),
    )
    return NativeBody(library(), weights)
