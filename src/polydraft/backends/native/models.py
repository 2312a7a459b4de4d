"""Llama-shaped models and feature heads on a CPU: each pass is one call of compiled code."""

import torch
from torch import Tensor, nn

from polydraft.backends.native.arguments import FLOATS, Weight
from polydraft.backends.native.body import BodyWeights, LayerWeights, NativeBody
from polydraft.backends.native.build import kernels, library
from polydraft.backends.native.product import weight_of
from polydraft.models.bodies import FastBody, LeanBody, LeanLayer, fast_body, is_product
from polydraft.models.heads.feature_head import FeatureHead
from polydraft.models.heads.head_context import FastHead, HeadContext, fast_head, following
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.models.packed import PackedEmbedding
from polydraft.models.quantised import Int8Body, Int8Layer, Int8Weight, is_int8_llama
from polydraft.operations import implements
from polydraft.trees import Block, causal_block


class NativeModel(NativeBody, FastBody):
    """A model whose passes are compiled code."""

    def extend(self, context: HFContext, tokens_BT: Tensor, block: Block) -> Tensor | None:
        """Pass a block; None in training, or if the weights have changed."""
        if not self.ready(context):
            return None
        assert max(context.lengths) + block.stop <= context.capacity, (context.lengths, block.stop, context.capacity)
        return self.run(context, tokens_BT, block, context.model.taps)


class NativeHead(NativeBody, FastHead):
    """A feature head whose passes are compiled code."""

    def read(
        self, context: HeadContext, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None
    ) -> Tensor | None:
        """Pass some entries; None in training, or if the weights have changed."""
        if not self.ready(context):
            return None
        return self.run(context, tokens_BT, block, features_BTF=following(fused_BWH, parents))

    def store(self, context: HeadContext, tokens_BT: Tensor, fused_BTH: Tensor) -> bool:
        """Store the keys and values of entries; return False in training, or if the weights have changed."""
        if not self.ready(context):
            return False
        block = causal_block(*tokens_BT.shape, context.device)
        self.run(context, tokens_BT, block, features_BTF=fused_BTH, stores_only=True)
        return True


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
    return NativeModel(library(), weights)


def _layer_weights(layer: LeanLayer | Int8Layer) -> LayerWeights:
    return LayerWeights(
        attention_norm=layer.input_norm.weight,
        qkv=_joint(layer.qkv, layer.qkv_bias),
        output=weight_of(layer.output),
        mlp_norm=layer.mlp_norm.weight,
        gate_up=_joint(layer.gate_up, layer.gate_up_bias),
        down=weight_of(layer.down),
    )


def _joint(weight: Tensor | Int8Weight, bias_F: Tensor | None) -> Weight:
    if isinstance(weight, Int8Weight):
        return Weight(weight.data_FX, bias_F, weight.scales_F, weight.num_inputs)
    return Weight(weight, bias_F)


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
        made = head.kept["native"] = _head_body(head)
    return made


def _head_body(head: FeatureHead) -> NativeHead:
    shape = head.shape
    assert head.join is not None and head.attention_norm is not None

    def angles(count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos_PC, _, sin_PC = head.angles(torch.arange(count), torch.float32).unbind(1)
        return cos_PC.repeat(1, 2), sin_PC.repeat(1, 2)

    layer = LayerWeights(
        attention_norm=head.attention_norm.weight,
        qkv=weight_of(head.qkv, head.int8),
        output=weight_of(head.attention_output, head.int8),
        mlp_norm=head.mlp_norm.weight,
        gate_up=weight_of(head.gate_up, head.int8),
        down=weight_of(head.down, head.int8),
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
        join=weight_of(head.join, head.int8),
    )
    return NativeHead(library(), weights)
