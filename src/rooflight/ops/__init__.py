"""Operators: what each is, its reference, gradient, cost and sample inputs. Imports torch only."""

from rooflight.ops.activation import silu_and_mul
from rooflight.ops.advance import advance_decode_
from rooflight.ops.contract import REGISTRY, Cost, Make, Operator, backend
from rooflight.ops.decode_attention import decode_attention, decode_attention_lse
from rooflight.ops.fused_linear import linear_add_, rms_norm_linear, rms_norm_swiglu
from rooflight.ops.layer_norm import fused_add_layer_norm, layer_norm
from rooflight.ops.linear import embedding, linear, pack_weight
from rooflight.ops.logprobs import top_logprobs
from rooflight.ops.merge_attention import merge_attention
from rooflight.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm
from rooflight.ops.norm_backward import layer_norm_backward, rms_norm_backward
from rooflight.ops.paged_attention import AttentionMeta
from rooflight.ops.penalties import penalize_logits_
from rooflight.ops.prefill_attention import prefill_attention, prefill_attention_lse
from rooflight.ops.prompt_attention import prompt_attention
from rooflight.ops.qk_norm_rope_attention import qk_norm_rope_attention_
from rooflight.ops.qk_norm_rope_cache import qk_norm_rope_cache_
from rooflight.ops.rope import rope, rope_
from rooflight.ops.sample import NO_TOKEN, sample
from rooflight.ops.scaled_linear import empty_scaled, linear_add_scale_, scaled_linear, scaled_rows, scaled_swiglu

__all__ = [
    "NO_TOKEN",
    "REGISTRY",
    "AttentionMeta",
    "Cost",
    "Make",
    "Operator",
    "advance_decode_",
    "backend",
    "decode_attention",
    "decode_attention_lse",
    "embedding",
    "empty_scaled",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_add_",
    "linear_add_scale_",
    "merge_attention",
    "pack_weight",
    "penalize_logits_",
    "prefill_attention",
    "prefill_attention_lse",
    "prompt_attention",
    "qk_norm_rope_attention_",
    "qk_norm_rope_cache_",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_linear",
    "rms_norm_swiglu",
    "rope",
    "rope_",
    "sample",
    "scaled_linear",
    "scaled_rows",
    "scaled_swiglu",
    "silu_and_mul",
    "top_logprobs",
]
