"""config.json to ModelConfig: what is given, what is derived, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rooflight.models import CheckpointError, load_config, load_model, rope_table
from rooflight.models.hf_config import config_dtype, from_hf_config
from tests.models import tiny

PLAIN = tiny.SHAPE | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}


def of(**changes: Any) -> Any:
    return from_hf_config(PLAIN | changes)


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (PLAIN | changes).items() if key not in keys}


THETA_1E6 = {
    "top level": {"rope_theta": 1e6},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "rope_scaling null": {"rope_theta": 1e6, "rope_scaling": None},
    "both, equal": {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}},
    "all three": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "nested by layer type": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
        }
    },
}


@pytest.mark.parametrize("family", list(tiny.CLASSES))
def test_br_036_theta_means_the_same_wherever_it_stands(family: str, tmp_path: Path) -> None:
    model = tiny.reference_model(family, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    tiny.save(model, tmp_path)
    expected = tiny.reference_logits(model, tiny.prompt(60))
    for changes in THETA_1E6.values():
        tiny.edit_config(tmp_path, remove=["rope_parameters", "rope_theta", "rope_scaling"], **changes)
        assert load_config(tmp_path).rope.theta == 1e6
        logits = tiny.decoder_logits(load_model(tmp_path).decoder, tiny.prompt(60))
        assert tiny.relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": {"rope_theta": 1e6}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_br_036_contradictions_are_refused_with_both_values(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(rope_theta|rope_type) is .* in .* but .* in rope_"):
        of(**changes)


def test_br_036_no_theta_at_all_is_the_published_default() -> None:
    assert of().rope.theta == 10_000.0


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_br_037_legacy_key_type_means_rope_type(key: str) -> None:
    rope = of(rope_theta=1e4, rope_scaling={key: "linear", "factor": 2.0}).rope
    assert (rope.rope_type, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "mrope", "su"])
def test_br_037_unknown_rope_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type must be one of default, linear, llama3, yarn, was '{name}'"):
        of(rope_scaling={"rope_type": name, "factor": 2.0})


def test_br_037_keys_that_would_be_dropped_are_refused() -> None:
    with pytest.raises(ValueError, match="rope_scaling has a key that no supported rope type has: 'mrope_section'"):
        of(rope_scaling={"rope_type": "default", "mrope_section": [1, 2]})
    with pytest.raises(ValueError, match="factor must be a finite number, was None"):
        of(rope_scaling={"rope_type": "linear"})


def test_br_037_original_length_falls_back_to_the_whole() -> None:
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert of(rope_scaling=scaling).rope.original_max_position_embeddings == 256
    assert of(rope_scaling=scaling, original_max_position_embeddings=64).rope.original_max_position_embeddings == 64
    yarn = of(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 64}).rope
    assert yarn.factor == 4.0  # 256 positions from 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            without(architectures=["GPT2LMHeadModel"]),
            "architecture must be one of Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM, "
            "was GPT2LMHeadModel",
        ),
        (without("architectures", model_type="gemma"), "architecture must be one of .*, was gemma"),
        (without("architectures"), "architecture must be one of .*, was None"),
        (without("hidden_size"), "hidden_size must be an integer from 1 to .*, was None"),
        (without(num_hidden_layers=0), "num_hidden_layers must be an integer from 1 to .*, was 0"),
        (without(vocab_size="many"), "vocab_size must be an integer from 1 to .*, was 'many'"),
        (without(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, was 'yes'"),
        (without(hidden_act="gelu"), "hidden_act must be 'silu', was 'gelu'"),
        (without(quantization_config={"quant_method": "gptq"}), "quantised .* are not read, this one is 'gptq'"),
        (without(eos_token_id="</s>"), "eos_token_id must be a token id or a list of them, was '</s>'"),
        (without(dtype="float8_e4m3fn"), "dtype must be one of float32, float16, bfloat16, was 'float8_e4m3fn'"),
        (without(dtype="float16", torch_dtype="bfloat16"), "dtype is 'float16' but torch_dtype is 'bfloat16'"),
        (without(head_dim=15), "the rotated part of head_dim 15 must be even, was 15"),
        (without(layer_types=["full_attention"]), "layer_types must be a list of 3 entries, was"),
        (without(layer_types=["full_attention", "chunked", "x"]), "layer_types may hold .*, had 'chunked'"),
        (without(layer_types=["sliding_attention"] * 3), "no sliding_window is in force"),
    ],
)
def test_what_cannot_be_right_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf_config(config)


JUNK = [None, True, -1, 0, 1.5, "x", [], ["x"], [[1]], {}, {"a": {"b": 1}}, 10**400, float("nan")]


@pytest.mark.parametrize("junk", JUNK, ids=lambda value: str(value)[:12] or "empty")
def test_no_value_of_any_key_is_more_than_a_value_error(junk: Any) -> None:
    keys = set(tiny.reference_model("qwen3").config.to_dict()) | {
        "architectures",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "torch_dtype",
        "text_config",
        "quantization_config",
    }
    for key in keys:
        for base in (PLAIN, PLAIN | {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}):
            try:
                config = from_hf_config(base | {key: junk}, {key: junk})
            except ValueError:
                continue
            assert config.num_parameters() > 0
    for key in ("factor", "type", "rope_theta", "original_max_position_embeddings", "beta_fast", "attention_factor"):
        yarn = {"rope_type": "yarn", "factor": 2.0} | {key: junk}
        try:
            table = rope_table(from_hf_config(PLAIN | {"rope_scaling": yarn}).rope, 16, 8)
        except ValueError:
            continue
        assert torch.isfinite(table).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 2), (40, 16), (4, 8)])
def test_br_025_heads_that_do_not_divide_are_refused_at_load(heads: int, kv_heads: int, tmp_path: Path) -> None:
    model = tiny.reference_model("qwen3")
    tiny.save(model, tmp_path)
    tiny.edit_config(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads)
    message = f"config.json: num_heads must be a multiple of num_kv_heads, were {heads} and {kv_heads}"
    for load in (load_config, load_model):
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


def test_br_040_hidden_size_that_does_not_divide_needs_a_head_dim() -> None:
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple of .* not given, were 192 and 5"):
        of(hidden_size=192, num_attention_heads=5, num_key_value_heads=5)
    assert of(hidden_size=192, num_attention_heads=5, num_key_value_heads=5, head_dim=32).head_dim == 32


def test_br_040_qwen3_without_the_key_has_its_own_head_dim() -> None:
    assert of(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert transformers.Qwen3Config(**tiny.SHAPE).head_dim == 128


def test_br_041_which_biases_each_family_has() -> None:
    qwen2 = of(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    plain = of()
    assert (plain.qkv_bias, plain.o_bias, plain.mlp_bias) == (False, False, False)
    llama = of(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_br_046_dtype_under_either_name_or_in_a_sub_config() -> None:
    bf16 = torch.bfloat16
    assert of(dtype="bfloat16").dtype == bf16
    assert of(torch_dtype="bfloat16").dtype == bf16
    assert of(torch_dtype="torch.bfloat16", dtype="bfloat16").dtype == bf16
    assert from_hf_config({"text_config": PLAIN | {"dtype": "bfloat16"}}).dtype == bf16
    assert from_hf_config({"torch_dtype": "bfloat16", "text_config": PLAIN}).dtype == bf16
    assert from_hf_config(PLAIN, file_dtype=bf16).dtype == bf16
    assert of().dtype == torch.float32
    assert config_dtype(PLAIN) is None


def test_br_046_a_text_sub_config_is_the_model() -> None:
    outer = {"architectures": ["SomeVisionModel"], "model_type": "vision", "text_config": without("architectures")}
    outer["text_config"]["model_type"] = "qwen3"
    assert from_hf_config(outer).family == "qwen3"
    assert from_hf_config(outer | {"eos_token_id": 7, "text_config": PLAIN}).family == "llama"


def test_br_050_every_end_token_of_both_files_counts_once() -> None:
    def ends(config: Any, generation: Any) -> tuple[int, ...]:
        return from_hf_config(PLAIN | {"eos_token_id": config}, {"eos_token_id": generation}).eos_ids

    assert ends(5, [7, 5, 9]) == (5, 7, 9)
    assert ends([5, 6], 6) == (5, 6)
    assert ends(None, 3) == (3,)
    assert ends(None, None) == ()
    assert from_hf_config(PLAIN | {"text_config": {"eos_token_id": [4]}}).eos_ids == (4,)
    assert of(bos_token_id=None).bos_id is None
    assert of(bos_token_id=3).bos_id == 3


def test_windows_by_family() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert of(**mistral, sliding_window=7).sliding_windows == (7, 7, 7)
    assert of(**mistral, sliding_window=None).sliding_windows == (0, 0, 0)
    assert of(**mistral).sliding_windows == (4096,) * 3
    assert transformers.MistralConfig(**tiny.SHAPE).sliding_window == 4096
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}
    assert of(**qwen2).sliding_windows == (0, 0, 0)
    assert of(**qwen2, use_sliding_window=True).sliding_windows == (0, 0, 0)  # of 28 layers on
    assert of(**qwen2, use_sliding_window=True, max_window_layers=2).sliding_windows == (0, 0, 7)
    assert of(sliding_window=7).sliding_windows == (0, 0, 0)


@given(
    family=st.sampled_from(list(tiny.CLASSES)),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([2, 16, 40]),
    layers=st.integers(1, 3),
    intermediate=st.integers(1, 70),
    vocab=st.integers(1, 90),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_parameters_are_counted_as_transformers_allocates_them(
    family: str,
    kv_heads: int,
    group: int,
    head_dim: int,
    layers: int,
    intermediate: int,
    vocab: int,
    flags: tuple[bool, bool, bool],
) -> None:
    tied, attention_bias, mlp_bias = flags
    heads = kv_heads * group
    settings = {
        "vocab_size": vocab,
        "hidden_size": heads * 8,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    if family != "qwen2":
        settings["head_dim"] = head_dim
    if family in ("qwen3", "llama"):
        settings["attention_bias"] = attention_bias
    if family == "llama":
        settings["mlp_bias"] = mlp_bias
    config_class, model_class = tiny.CLASSES[family]
    with torch.device("meta"):
        model = model_class(config_class(**settings))
    config = from_hf_config(model.config.to_dict() | {"architectures": [model_class.__name__]})
    assert config.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    per_layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert config.parameters_per_layer() == per_layer
    embedding = 0 if tied else vocab * heads * 8
    assert config.weight_bytes_per_token(torch.float16) == 2 * (config.num_parameters() - embedding)
    assert config.kv_bytes_per_token(torch.float32) == 2 * layers * kv_heads * config.head_dim * 4
