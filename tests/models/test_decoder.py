"""The decoder against transformers, teacher-forced in FP32, and against itself under every way of feeding it.

The bound is 1e-5 of the largest logit; what is measured is 2e-6 and less.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rooflight import ops
from rooflight.models import Decoder, SingleRank, load_config, load_model
from rooflight.models.config import RopeConfig
from rooflight.models.recipe import Recipe
from rooflight.models.shapes import parameter_shapes
from tests.models import tiny

LENGTH = 100
BOUND = 1e-5
FAMILIES = list(tiny.CLASSES)


def loaded(model: Any, folder: Path) -> Decoder:
    return load_model(tiny.save(model, folder)).decoder


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, torch.Tensor]:
    """A decoder and transformers' logits of the prompt, for each family. Mistral's window is 24 of 100 tokens."""
    model = tiny.reference_model(request.param)
    decoder = loaded(model, tmp_path_factory.mktemp(request.param))
    return decoder, tiny.reference_logits(model, tiny.prompt(LENGTH))


@pytest.mark.parametrize("size", [LENGTH, 64, 7, 1])
def test_logits_equal_transformers_whole_chunked_and_token_by_token(
    pair: tuple[Decoder, torch.Tensor], size: int
) -> None:
    decoder, expected = pair
    actual = tiny.decoder_logits(decoder, tiny.prompt(LENGTH), tiny.chunks_of(LENGTH, size))
    assert actual.dtype == torch.float32
    assert tiny.relative_error(actual, expected) < BOUND


def test_sequences_in_one_batch_equal_each_alone(pair: tuple[Decoder, torch.Tensor]) -> None:
    decoder, _ = pair
    prompts = [tiny.prompt(length, seed=length) for length in (37, 1, 20)]
    paged = tiny.Paged(decoder.config, 3, 48)
    with torch.inference_mode():
        positions, slots, meta = paged.step([35, 1, 10])
        ids = torch.cat([prompts[0][:35], prompts[1], prompts[2][:10]])
        decoder(ids, positions, paged.caches, slots, meta, False)
        # A prefill that continues one sequence beside a decode of another and an idle one.
        positions, slots, meta = paged.step([1, 0, 9])
        ids = torch.cat([prompts[0][35:36], prompts[2][10:19]])
        decoder(ids, positions, paged.caches, slots, meta, False)
        positions, slots, meta = paged.step([1, 1, 1])
        ids = torch.stack([prompts[0][36], prompts[1][0], prompts[2][19]])
        last = decoder.logits(decoder(ids, positions, paged.caches, slots, meta, True))
    repeated = torch.cat([prompts[1], prompts[1]])
    for row, ids in zip(last, (prompts[0], repeated, prompts[2]), strict=True):
        assert tiny.relative_error(row, tiny.decoder_logits(decoder, ids)[-1]) < BOUND


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    model = tiny.reference_model("qwen3")
    decoder = loaded(model, tmp_path)
    expected = tiny.decoder_logits(decoder, tiny.prompt(LENGTH))
    actual = tiny.decoder_logits(decoder.to(torch.bfloat16), tiny.prompt(LENGTH))
    reference = tiny.reference_logits(model.to(torch.bfloat16), tiny.prompt(LENGTH))
    error, baseline = ((x - expected).square().mean().sqrt() for x in (actual, reference))
    assert error < 1.5 * baseline  # same roundings in other places


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN | {"factor": 8.0},
    "yarn-attention-factor": YARN | {"factor": 64.0, "attention_factor": 1.0},
    "yarn-mscale": YARN | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-mscales": YARN | {"factor": 16.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-untruncated": YARN | {"factor": 8.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ROPES)
def test_br_037_logits_of_every_rope_type_equal_transformers(name: str, family: str, tmp_path: Path) -> None:
    model = tiny.reference_model(family, rope_parameters=dict(ROPES[name]))
    expected = tiny.reference_logits(model, tiny.prompt(LENGTH))
    actual = tiny.decoder_logits(loaded(model, tmp_path), tiny.prompt(LENGTH))
    assert tiny.relative_error(actual, expected) < BOUND


def test_partial_rotary_rotates_the_first_part_of_each_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers' Llama knows no partial rotation; with GPT-NeoX's rotation in it (and a rope type whose table
    # heeds the factor) it is the same model.
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny.reference_model("llama", rope_parameters=rope)
    expected = tiny.reference_logits(model, tiny.prompt(LENGTH))
    decoder = loaded(model, tmp_path)
    assert decoder.cos_sin.shape == (256, 8)  # half of a head of 16
    assert tiny.relative_error(tiny.decoder_logits(decoder, tiny.prompt(LENGTH)), expected) < BOUND


@pytest.mark.parametrize(
    "settings",
    [
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
    ],
    ids=["from-layer-1", "all", "layer-types", "switched-off"],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_some_layers_equal_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.reference_model(family, **settings)
    expected = tiny.reference_logits(model, tiny.prompt(LENGTH))
    decoder = loaded(model, tmp_path)
    for size in (LENGTH, 1):
        actual = tiny.decoder_logits(decoder, tiny.prompt(LENGTH), tiny.chunks_of(LENGTH, size))
        assert tiny.relative_error(actual, expected) < BOUND


GROUPS = [(40, 8, 64), (24, 4, 80), (28, 4, 128), (14, 2, 256), (3, 1, 64), (64, 4, 80), (32, 32, 64), (3, 1, 256)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), GROUPS)
def test_br_025_any_ratio_of_heads_in_prefill_and_decode(
    num_heads: int, num_kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    model = tiny.reference_model(
        "qwen3",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
    )
    expected = tiny.reference_logits(model, tiny.prompt(20))
    decoder = loaded(model, tmp_path)
    for chunks in ([20], [16, 1, 1, 1, 1]):
        assert tiny.relative_error(tiny.decoder_logits(decoder, tiny.prompt(20), chunks), expected) < BOUND


@pytest.mark.parametrize(
    ("family", "settings", "head_dim"),
    [
        ("llama", {"hidden_size": 160, "head_dim": 64}, 64),
        ("qwen3", {"hidden_size": 160, "head_dim": 64}, 64),
        ("mistral", {"hidden_size": 160, "head_dim": 64}, 64),
        ("llama", {"hidden_size": 160, "head_dim": None}, 40),
        ("qwen2", {"hidden_size": 160}, 40),
        ("mistral", {"hidden_size": 160, "head_dim": None}, 40),
        ("qwen3", {"hidden_size": 192, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32}, 32),
        ("mistral", {"hidden_size": 192, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32}, 32),
    ],
)
@pytest.mark.parametrize("key", ["as saved", "absent or null"])
def test_br_040_head_dim_given_or_derived(
    family: str, settings: dict[str, Any], head_dim: int, key: str, tmp_path: Path
) -> None:
    model = tiny.reference_model(family, **settings)
    tiny.save(model, tmp_path)
    if key == "absent or null" and settings.get("head_dim") is None:
        tiny.edit_config(tmp_path, **({"remove": ["head_dim"]} if family == "llama" else {"head_dim": None}))
    decoder = load_model(tmp_path).decoder
    assert decoder.config.head_dim == head_dim
    expected = tiny.reference_logits(model, tiny.prompt(30))
    assert tiny.relative_error(tiny.decoder_logits(decoder, tiny.prompt(30)), expected) < BOUND


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("when", ["built in bf16", "moved to bf16", "bf16 and back"])
def test_br_012_rope_table_stays_fp32(theta: float, when: str) -> None:
    config = replace(
        load_config("random:tiny"),
        vocab_size=8,
        hidden_size=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope=RopeConfig(theta=theta),
    )
    decoder = Decoder(config, dtype=torch.bfloat16 if when == "built in bf16" else None)
    if when != "built in bf16":
        decoder = decoder.to(torch.bfloat16)
    if when == "bf16 and back":
        decoder = decoder.float().half().float()
    assert decoder.cos_sin.dtype == torch.float32
    positions = torch.tensor([0, 1, 257, 1857, 4095, 40_959])
    q = torch.ones(len(positions), 1, 128, dtype=torch.bfloat16)
    rotated, _ = ops.rope(q, q, decoder.cos_sin, positions)
    angles = torch.outer(positions.double(), theta ** -(torch.arange(0, 128, 2).double() / 128))
    cos, sin = angles.cos(), angles.sin()
    expected = torch.cat([cos - sin, cos + sin], dim=1)
    assert (rotated[:, 0].double() - expected).abs().max() <= 0.01
    table = torch.cat([cos, sin], dim=1)
    assert (decoder.cos_sin[positions].double() - table).abs().max() < 1e-7


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_built_for_its_shapes_can_be_given_memory(tied: bool) -> None:
    config = replace(load_config("random:tiny"), tie_word_embeddings=tied)
    decoder = Decoder(config, device="meta")
    assert all(tensor.is_meta for tensor in (*decoder.parameters(), decoder.cos_sin))
    decoder.to_empty(device="cpu")
    assert torch.equal(decoder.cos_sin, Decoder(config).cos_sin)
    assert (decoder.head.weight is decoder.embed) == tied
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert shapes == parameter_shapes(config)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert sum(parameter.numel() for parameter in decoder.parameters()) == config.num_parameters()


def test_no_tokens_give_no_rows() -> None:
    decoder = load_model("random:tiny").decoder
    paged = tiny.Paged(decoder.config, 1, 16)
    positions, slots, meta = paged.step([0])
    hidden = decoder(torch.empty(0, dtype=torch.int64), positions, paged.caches, slots, meta, False)
    assert hidden.shape == (0, 64)
    assert decoder.logits(hidden).shape == (0, 1000)


WANTED = {
    "last of each": [8, 9, 23],
    "one": [16],
    "order and repeats": [23, 3, 9, 9, 0, 23],
    "all": list(range(24)),
    "none": [],
}


def crowd(decoder: Decoder, wanted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows of a step of 9, 1 and 14 tokens, two sequences going on with theirs, and what the caches then hold,
    as plain bits."""
    paged = tiny.Paged(decoder.config, 3, 48)
    with torch.inference_mode():
        positions, slots, meta = paged.step([12, 5, 0])
        decoder(tiny.prompt(17, seed=2), positions, paged.caches, slots, meta, False)
        positions, slots, meta = paged.step([9, 1, 14])
        hidden = decoder(tiny.prompt(24), positions, paged.caches, slots, meta, False, wanted)
    return hidden, torch.stack([cache for layer in paged.caches for cache in layer]).view(torch.int32)


@pytest.mark.parametrize("projections", [False, True], ids=["apart", "projections"])
@pytest.mark.parametrize("name", WANTED)
def test_wanted_rows_are_those_of_a_run_of_all(
    pair: tuple[Decoder, torch.Tensor], name: str, projections: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order and as often; keys and values of all tokens are in the cache, to the bit."""
    decoder, _ = pair
    monkeypatch.setattr(decoder, "recipe", Recipe(projections=projections))
    every, caches = crowd(decoder, None)
    found, written = crowd(decoder, torch.tensor(WANTED[name], dtype=torch.int64))
    assert every.shape == (24, 64)
    assert found.shape == (len(WANTED[name]), 64)
    if WANTED[name]:
        assert tiny.relative_error(found, every[WANTED[name]]) < BOUND
        assert tiny.relative_error(decoder.logits(found), decoder.logits(every)[WANTED[name]]) < BOUND
    assert torch.equal(written, caches)
    assert int((~written.view(torch.float32).isnan()).sum()) == (12 + 5 + 24) * decoder.config.kv_bytes_per_token() // 4


@pytest.mark.parametrize("projections", [False, True], ids=["apart", "projections"])
def test_rows_are_picked_where_there_is_one_layer(projections: bool, tmp_path: Path) -> None:
    decoder = loaded(tiny.reference_model("qwen3", num_hidden_layers=1), tmp_path)
    decoder.recipe = Recipe(projections=projections)
    every, caches = crowd(decoder, None)
    found, written = crowd(decoder, torch.tensor([23, 0]))
    assert tiny.relative_error(found, every[[23, 0]]) < BOUND
    assert torch.equal(written, caches)


@pytest.mark.parametrize("wanted", [[2, 0], [1], []])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "attention"])
def test_rows_of_a_decode_step_can_be_picked(
    pair: tuple[Decoder, torch.Tensor], wanted: list[int], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _ = pair
    monkeypatch.setattr(decoder, "recipe", Recipe(projections=together, attention=together))
    found, written = [], []
    for rows in (None, torch.tensor(wanted, dtype=torch.int64)):
        paged = tiny.Paged(decoder.config, 3, 48)
        with torch.inference_mode():
            positions, slots, meta = paged.step([12, 5, 7])
            decoder(tiny.prompt(24), positions, paged.caches, slots, meta, False)
            positions, slots, meta = paged.step([1, 1, 1])
            found.append(decoder(tiny.prompt(3, seed=5), positions, paged.caches, slots, meta, True, rows))
        written.append(torch.stack([cache for layer in paged.caches for cache in layer]).view(torch.int32))
    every, picked = found
    assert picked.shape == (len(wanted), 64)
    assert not wanted or tiny.relative_error(picked, every[wanted]) < BOUND
    assert torch.equal(*written)


@pytest.mark.parametrize("projections", [False, True], ids=["apart", "projections"])
def test_no_tokens_and_none_wanted(projections: bool) -> None:
    decoder = load_model("random:tiny").decoder
    decoder.recipe = Recipe(projections=projections)
    paged = tiny.Paged(decoder.config, 1, 16)
    positions, slots, meta = paged.step([0])
    nothing = torch.empty(0, dtype=torch.int64)
    with torch.inference_mode():
        hidden = decoder(nothing, positions, paged.caches, slots, meta, False, nothing)
        assert hidden.shape == (0, 64)
        assert decoder.logits(hidden).shape == (0, 1000)


@pytest.mark.parametrize("wanted", [0, 2])
@pytest.mark.parametrize("projections", [False, True], ids=["apart", "projections"])
def test_picked_rows_can_be_traced_with_fake_tensors(projections: bool, wanted: int) -> None:
    config = load_config("random:tiny")
    with FakeTensorMode(), torch.inference_mode():
        decoder = Decoder(config, dtype=torch.bfloat16)
        decoder.recipe = Recipe(projections=projections)
        paged = tiny.Paged(config, 4, 32, dtype=torch.bfloat16)
        rows = torch.zeros(9, dtype=torch.int64)
        lengths = torch.zeros(4, dtype=torch.int32)
        meta = ops.AttentionMeta(paged.block_table, lengths, torch.zeros(5, dtype=torch.int32), 9, 32)
        picks = torch.zeros(wanted, dtype=torch.int64)
        hidden = decoder(rows, rows, paged.caches, rows, meta, False, picks)
    assert (hidden.shape, hidden.dtype) == ((wanted, 64), torch.bfloat16)


@pytest.mark.parametrize("decode", [True, False])
def test_the_decoder_can_be_traced_with_fake_tensors(decode: bool) -> None:
    config = load_config("random:tiny")
    with FakeTensorMode(), torch.inference_mode():
        decoder = Decoder(config, dtype=torch.bfloat16)
        paged = tiny.Paged(config, 4, 32, dtype=torch.bfloat16)
        rows = torch.zeros(4, dtype=torch.int64)
        lengths = torch.zeros(4, dtype=torch.int32)
        meta = ops.AttentionMeta(paged.block_table, lengths, torch.zeros(5, dtype=torch.int32), 1, 32)
        hidden = decoder(rows, rows, paged.caches, rows, meta, decode)
        logits = decoder.logits(hidden)
    assert (hidden.shape, hidden.dtype) == ((4, 64), torch.bfloat16)
    assert (logits.shape, logits.dtype) == ((4, 1000), torch.float32)


def test_a_cache_for_each_layer_is_needed() -> None:
    decoder = load_model("random:tiny").decoder
    paged = tiny.Paged(decoder.config, 1, 16)
    positions, slots, meta = paged.step([3])
    with torch.inference_mode(), pytest.raises(ValueError, match="zip"):
        decoder(tiny.prompt(3), positions, paged.caches[:1], slots, meta, False)


class CountingRank(SingleRank):
    """One rank that doubles what it exchanges and counts."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_reduce", tuple(tensor.shape)))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls.append((f"all_gather {dim}", tuple(tensor.shape)))
        return tensor


def test_the_communicator_is_asked_where_cut_weights_need_it() -> None:
    communicator = CountingRank()
    decoder = load_model("random:tiny", communicator=communicator).decoder
    tiny.decoder_logits(decoder, tiny.prompt(5))
    # embedding, then o and down of two layers, then the head
    assert communicator.calls == [("all_reduce", (5, 64))] * 5 + [("all_gather -1", (5, 1000))]
    communicator.calls.clear()
    paged = tiny.Paged(decoder.config, 1, 16)
    positions, slots, meta = paged.step([5])
    with torch.inference_mode():
        decoder(tiny.prompt(5), positions, paged.caches, slots, meta, False, torch.tensor([4, 1]))
    # o and down of the last layer are of the wanted rows alone
    assert communicator.calls == [("all_reduce", (5, 64))] * 3 + [("all_reduce", (2, 64))] * 2


def test_more_ranks_than_one_are_refused() -> None:
    communicator = CountingRank()
    communicator.size = 2
    with pytest.raises(ValueError, match="communicator must have one rank"):
        Decoder(load_config("random:tiny"), communicator)
