"""Presets: published figures, and seeded values that keep activations sane."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch

from rooflight.models import CheckpointError, load_config, load_model
from rooflight.models.checkpoint.random_weights import PRESETS, RandomCheckpoint, preset
from rooflight.models.weights import hf_targets
from tests.models import tiny

# Parameters as the models' own pages and safetensors indices give them.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    assert load_config(f"random:{name}").num_parameters() == PUBLISHED[name]


def test_the_figures_of_qwen3_0_6b() -> None:
    config = load_config("random:qwen3-0.6b")
    assert config.num_parameters() == 596_049_920
    assert config.parameters_per_layer() == 15_730_944
    assert config.weight_bytes_per_token() == 1_192_099_840  # bf16: 1,192.1 MB
    assert config.weight_bytes_per_token(torch.float32) == 2_384_199_680
    assert config.kv_bytes_per_token() == 114_688  # 112 KiB
    # An untied embedding is not read, the head is.
    large = load_config("random:qwen3-8b")
    assert large.weight_bytes_per_token() == 2 * (8_190_735_360 - 151_936 * 4096)


def test_configs_of_presets_take_no_time_and_no_memory() -> None:
    tracemalloc.start()
    start = time.process_time()
    for name in PRESETS:
        load_config(f"random:{name}").num_parameters()
    elapsed, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert elapsed < 0.2
    assert peak < 1_000_000


def test_an_unknown_preset_lists_the_known_ones() -> None:
    for load in (load_config, load_model):
        with pytest.raises(CheckpointError, match=r"unknown preset random:gpt-5; known: random:qwen3-0.6b, .*tiny"):
            load("random:gpt-5")


def checkpoint(seed: int = 0) -> RandomCheckpoint:
    config = preset("tiny")
    shapes = {name: target.shape for name, target in hf_targets(config).items()}
    return RandomCheckpoint("random:tiny", config, shapes, seed)


def read(source: RandomCheckpoint, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(source.tensors[name].shape, dtype=dtype)
    source.read_into(name, out)
    return out


def test_values_depend_on_seed_and_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(checkpoint().tensors)
    forwards = {name: read(checkpoint(), name) for name in names}
    source = checkpoint()
    backwards = {name: read(source, name) for name in reversed(names)}
    assert all(torch.equal(forwards[name], backwards[name]) for name in names)
    monkeypatch.setattr("rooflight.models.checkpoint.random_weights._VALUES_AT_ONCE", 100)
    assert all(torch.equal(forwards[name], read(checkpoint(), name)) for name in names)  # nor on block sizes
    other = checkpoint(seed=1)
    assert not any(torch.equal(forwards[name], read(other, name)) for name in names)
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(forwards[first], forwards[second])
    assert torch.equal(read(checkpoint(), first, torch.bfloat16), forwards[first].bfloat16())


def test_two_loads_are_equal() -> None:
    first, second = (load_model("random:tiny").decoder.state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_activations_stay_near_one_through_thirty_layers() -> None:
    loaded = load_model("random:smollm2-135m", dtype="fp32")
    ids = tiny.prompt(16, vocab_size=49_152)
    logits = tiny.decoder_logits(loaded.decoder, ids)
    assert 0.3 < logits.std() < 3
    sizes: list[float] = []
    for layer in loaded.decoder.layers:
        layer.register_forward_hook(lambda _module, _args, out: sizes.append(float(out[0].std())))
    tiny.decoder_logits(loaded.decoder, ids)
    assert len(sizes) == 30
    assert all(0.01 < size < 3 for size in sizes)
