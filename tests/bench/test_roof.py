"""What the machine allows an engine: bytes of a step, operations of prompts, and whose ceilings count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooflight.bench import roof
from rooflight.bench.roof import Roof, chosen_device, cpu_roof, kv_bytes, prompt_flops, roof_of
from rooflight.limits.card import Bandwidth, Card
from rooflight.limits.ceilings import ceilings
from rooflight.limits.trace import Step, trace
from rooflight.models.load import load_config

QWEN = load_config("random:qwen3-0.6b")
BF16 = torch.bfloat16
WEIGHTS, KV = 1_192_099_840, 114_688  # bytes a step, bytes a token of context


def test_a_step_reads_weights_and_the_caches_of_all_its_sequences() -> None:
    flat = Roof("", (Bandwidth(1, 4e12),))
    assert flat.step_seconds(QWEN, BF16, 0) == pytest.approx(WEIGHTS / 4e12, rel=1e-3)
    alone = flat.step_seconds(QWEN, BF16, 1000) - flat.step_seconds(QWEN, BF16, 0)
    assert alone == pytest.approx(1000 * KV / 4e12)
    many = flat.step_seconds(QWEN, BF16, 1000, 7) - flat.step_seconds(QWEN, BF16, 0)
    assert many == pytest.approx(7 * alone)


def test_the_rate_is_that_of_the_whole_stream() -> None:
    points = (Bandwidth(10**8, 1e12), Bandwidth(10**10, 4e12))
    found = Roof("", points).step_seconds(QWEN, BF16, 80_000)  # 10.4 GB: beyond the largest that was measured
    assert found == pytest.approx((QWEN.weight_bytes_per_token(BF16) + 80_000 * KV) / 4e12)
    assert Roof("", points).step_seconds(QWEN, BF16, 0) > QWEN.weight_bytes_per_token(BF16) / 4e12
    assert Roof("", points).read_bandwidth == 4e12


def test_on_a_cpu_the_weights_alone_count() -> None:
    found = cpu_roof(20e9)
    assert found.step_seconds(QWEN, BF16, 8192, 9) == QWEN.weight_bytes_per_token(BF16) / 20e9
    assert found.prompt_seconds(QWEN, "bf16", 1000) == 0.0


def test_a_sliding_window_reads_what_is_within_it() -> None:
    windows = (0,) * 14 + (100,) * 14
    assert kv_bytes(replace(QWEN, sliding_windows=windows), BF16, 1000) == pytest.approx(KV / 2 * 1100)
    assert kv_bytes(QWEN, BF16, 1000) == KV * 1000


def test_operations_of_a_prompt() -> None:
    """By hand for random:tiny: 2 layers of 64 -> 4 heads of 32 with 2 KV heads, MLP of 160, 1000 words."""
    tiny = load_config("random:tiny")
    norms = 2 * 64 + 2 * 32  # parameters that are counted as products too
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 160 + norms
    attention = 4 * 4 * 32 * (1 + 2 + 3)
    unread = 2 * (128 * 64 + 3 * 64 * 160)  # behind the last layer's attention, of each token but the last
    assert prompt_flops(tiny, 3) == 2 * 2 * layer * 3 - 2 * unread + 2 * attention + 2 * 1000 * 64
    # Norms are parameters that it counts like products; of the operators' costs only products count here.
    calls = [call for call in trace(tiny, Step("prefill", 1, 3)) if call.operator in ("linear", "prefill_attention")]
    assert prompt_flops(tiny, 3) - 2 * 2 * norms * 3 == sum(call.cost.flops for call in calls)
    windowed = prompt_flops(replace(tiny, sliding_windows=(2, 0)), 3)
    assert prompt_flops(tiny, 3) - windowed == 4 * 4 * 32 * 1  # the last query does not see the first key
    assert Roof("", (), {"bf16": 1e9}).prompt_seconds(tiny, "bf16", 3, 5) == 5 * prompt_flops(tiny, 3) / 1e9


def test_a_card_that_was_measured_has_its_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(roof, "measure_card", lambda: pytest.fail("measured again"))
    found, card = roof_of("cuda", 1), ceilings("h200")
    assert (found.read, found.flops["bf16"]) == (card.read, card.flops["bf16"])
    assert found.origin == f"NVIDIA H200, {card.origin}"
    assert "commit" in found.origin


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA Test 1"])  # one with a data sheet alone, one without
def test_a_card_that_was_not_is_measured_now(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(name, 2**20, (), (Bandwidth(5, 7e11),), {"bf16": 3e13})
    monkeypatch.setattr(roof, "gpu_name", lambda: name)
    monkeypatch.setattr(roof, "measure_card", lambda: card)
    found = roof_of("cuda", 1)
    assert (found.read_bandwidth, found.flops, found.origin) == (
        7e11,
        {"bf16": 3e13},
        f"{name}, measured before the run",
    )


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [chosen_device(name) for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [chosen_device(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match=r"^device must be one that this machine has \(cpu\), was 'cuda'$"):
        chosen_device("cuda")
    with pytest.raises(ValueError, match=r"^device must be one of auto, cpu, cuda, was 'cuda:1'$"):
        chosen_device("cuda:1")
