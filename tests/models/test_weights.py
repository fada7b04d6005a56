"""Which tensor fills which rows, and what happens when the lists do not match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooflight.models import CheckpointError, ModelConfig, load_config, load_model
from rooflight.models.checkpoint.random_weights import PRESETS
from rooflight.models.shapes import parameter_shapes
from rooflight.models.weights import Target, gguf_targets, hf_targets
from tests.models import tiny


def change_tensors(folder: Path, *, remove: str = "", **new: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != remove}
    save_file(tensors | {name.replace("__", "."): tensor for name, tensor in new.items()}, path)
    return path


def error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    return str(caught.value)


def every_row_once(config: ModelConfig, targets: dict[str, Target]) -> bool:
    filled: dict[str, list[int]] = {name: [0] * shape[0] for name, shape in parameter_shapes(config).items()}
    for target in targets.values():
        assert target.shape[1:] == parameter_shapes(config)[target.parameter][1:]
        for row in range(target.start, target.start + target.shape[0]):
            filled[target.parameter][row] += 1
    return all(set(rows) == {1} for rows in filled.values())


@pytest.mark.parametrize("name", PRESETS)
def test_targets_fill_every_row_of_every_parameter_once(name: str) -> None:
    assert every_row_once(PRESETS[name], hf_targets(PRESETS[name]))
    assert every_row_once(PRESETS[name], gguf_targets(PRESETS[name]))


@pytest.mark.parametrize("family", list(tiny.CLASSES))
def test_targets_are_exactly_what_transformers_saves(family: str, tmp_path: Path) -> None:
    model = tiny.reference_model(family)
    config = load_config(tiny.save(model, tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: target.shape for name, target in hf_targets(config).items()} == expected
    assert set(gguf_targets(config)) == {tiny.gguf_name(name) for name in expected}


def test_packed_rows_are_q_k_v_and_gate_up(tmp_path: Path) -> None:
    model = tiny.reference_model("qwen2")
    decoder = load_model(tiny.save(model, tmp_path)).decoder
    layer, reference = decoder.layers[1], model.model.layers[1]
    attention = reference.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(layer.qkv.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(layer.qkv.bias, torch.cat([part.bias for part in parts]))
    up = torch.cat([reference.mlp.gate_proj.weight, reference.mlp.up_proj.weight])
    assert torch.equal(layer.gate_up.weight, up)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.2.self_attn.k_norm.weight", "model.layers.0.mlp.up_proj.weight"],
)
def test_a_missing_tensor_is_named_with_its_folder(name: str, tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    change_tensors(tmp_path, remove=name)
    assert error(tmp_path) == f"{tmp_path}: tensor {name} is missing"


def test_an_unexpected_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    path = change_tensors(tmp_path, model__layers__3__mlp__up_proj__weight=torch.zeros(2, 3))
    assert error(tmp_path) == f"{path}: tensor model.layers.3.mlp.up_proj.weight is unexpected, shape (2, 3)"


def test_a_mis_shaped_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    path = change_tensors(tmp_path, model__norm__weight=torch.zeros(63))
    assert error(tmp_path) == f"{path}: tensor model.norm.weight must have shape (64,), has (63,)"


def test_a_wrong_config_names_the_first_of_many(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    tiny.edit_config(tmp_path, num_hidden_layers=9, layer_types=None)
    message = error(tmp_path)
    assert "tensor model.layers.3.input_layernorm.weight is missing" in message
    assert message.endswith("; and 70 more")  # 6 layers of 15 tensors, 20 of them named
    assert "\n" not in message


def test_br_041_biases_are_read_and_none_is_dropped(tmp_path: Path) -> None:
    for family, settings in (("qwen2", {}), ("llama", {"attention_bias": True}), ("llama", {"mlp_bias": True})):
        folder = tmp_path / f"{family}-{'-'.join(settings)}"
        model = tiny.reference_model(family, **({"attention_bias": False, "mlp_bias": False} | settings))
        tiny.save(model, folder)
        decoder = load_model(folder).decoder
        for index, layer in enumerate(model.model.layers):
            for name, bias in layer.named_parameters():
                if name.endswith("q_proj.bias"):
                    assert torch.equal(decoder.layers[index].qkv.bias[:64], bias)
                if name.endswith("o_proj.bias"):
                    assert torch.equal(decoder.layers[index].o.bias, bias)
        expected = tiny.reference_logits(model, tiny.prompt(40))
        assert tiny.relative_error(tiny.decoder_logits(decoder, tiny.prompt(40)), expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "key", "lost"),
    [("llama", "attention_bias", "self_attn.o_proj.bias"), ("llama", "mlp_bias", "mlp.down_proj.bias")],
)
def test_br_041_a_bias_that_the_config_denies_is_an_error(family: str, key: str, lost: str, tmp_path: Path) -> None:
    tiny.save(tiny.reference_model(family), tmp_path)
    tiny.edit_config(tmp_path, **{key: False})
    assert f"tensor model.layers.0.{lost} is unexpected" in error(tmp_path)


def test_br_041_a_missing_qwen2_bias_is_an_error(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen2"), tmp_path)
    change_tensors(tmp_path, remove="model.layers.1.self_attn.k_proj.bias")
    assert error(tmp_path) == f"{tmp_path}: tensor model.layers.1.self_attn.k_proj.bias is missing"


def tied_folder(folder: Path) -> tuple[Any, Path]:
    model = tiny.reference_model("qwen3", tie_word_embeddings=True)
    tiny.save(model, folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    return model, folder


def test_br_038_tied_embeddings_without_a_head(tmp_path: Path) -> None:
    model, folder = tied_folder(tmp_path)
    decoder = load_model(folder).decoder
    assert decoder.head.weight is decoder.embed
    expected = tiny.reference_logits(model, tiny.prompt(40))
    assert tiny.relative_error(tiny.decoder_logits(decoder, tiny.prompt(40)), expected) < 1e-5


def test_br_038_a_copy_of_the_embedding_as_the_head_is_left_aside(tmp_path: Path) -> None:
    model, folder = tied_folder(tmp_path)
    change_tensors(folder, lm_head__weight=model.model.embed_tokens.weight.detach().clone())
    loaded = load_model(folder)
    assert loaded.decoder.head.weight is loaded.decoder.embed
    assert loaded.config.num_parameters() == load_config(folder).num_parameters()
    expected = tiny.reference_logits(model, tiny.prompt(40))
    assert tiny.relative_error(tiny.decoder_logits(loaded.decoder, tiny.prompt(40)), expected) < 1e-5


def test_br_038_a_head_of_its_own_is_used_as_transformers_does(tmp_path: Path) -> None:
    import transformers

    _, folder = tied_folder(tmp_path)
    change_tensors(folder, lm_head__weight=torch.randn(1000, 64, generator=torch.Generator().manual_seed(3)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with pytest.warns(UserWarning, match=r"lm_head.weight is there and differs from the embedding"):
        loaded = load_model(folder)
    assert not loaded.config.tie_word_embeddings
    expected = tiny.reference_logits(reference, tiny.prompt(40))
    assert tiny.relative_error(tiny.decoder_logits(loaded.decoder, tiny.prompt(40)), expected) < 1e-5


def test_br_038_an_untied_model_without_a_head_is_an_error(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    change_tensors(tmp_path, remove="lm_head.weight")
    assert error(tmp_path) == f"{tmp_path}: tensor lm_head.weight is missing"


def test_saved_rotary_frequencies_are_not_needed(tmp_path: Path) -> None:
    model = tiny.reference_model("llama")
    tiny.save(model, tmp_path)
    change_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    expected = tiny.reference_logits(model, tiny.prompt(20))
    assert tiny.relative_error(tiny.decoder_logits(load_model(tmp_path).decoder, tiny.prompt(20)), expected) < 1e-5
