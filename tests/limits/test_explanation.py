"""Limits of whole steps: figures that are known, what changes would do, what fits, and advice."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooflight.limits.advice import STEPS, advise, what_if
from rooflight.limits.ceilings import ceilings, known
from rooflight.limits.explanation import Explanation, explain
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config
from rooflight.ops.paged_attention import _seen

QWEN = load_config("random:qwen3-0.6b")
QWEN_8B = load_config("random:qwen3-8b")
TINY = load_config("random:tiny")


def decode(batch: int = 1, context: int = 0, gpu: str = "h200", **formats: str) -> Scenario:
    return Scenario(Step("decode", batch, context), gpu, **formats)


def test_qwen3_06b_as_known() -> None:
    found = explain("qwen3-0.6b", QWEN, decode())
    assert found.weight_bytes == 1_192_099_840
    assert found.bytes == pytest.approx(1_195.4e6, rel=1e-3)  # and what is written, at a little less than the read rate
    assert found.card.read_rate(found.bytes) == pytest.approx(4.63e12, rel=0.05)  # records of this card differ by 2 %
    assert found.stream_us == pytest.approx(found.bytes / found.card.read_rate(found.bytes) * 1e6, rel=1e-3)
    assert found.stream_wall == "memory"
    assert found.tokens_per_s == pytest.approx(1e6 / found.stream_us)
    assert found.kv_bytes_per_token == 112 * 1024
    assert found.crossing == pytest.approx(10_394, abs=1)
    assert found.launches == sum(row.calls for row in found.rows)
    assert found.host_us == pytest.approx(found.launches * found.card.call_us)


def test_where_kv_passes_the_weights() -> None:
    at = explain("qwen3-0.6b", QWEN, decode(context=10_393))
    assert at.kv_bytes == pytest.approx(at.weight_bytes, rel=1e-3)


@pytest.mark.parametrize("key", known())
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_sums_and_shares(key: str, phase: str) -> None:
    found = explain("tiny", TINY, Scenario(Step(phase, 3, 200), key))
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert sum(row.limit_us for row in found.rows) == pytest.approx(found.graph_us)
    assert sum(row.bytes for row in found.rows) == found.bytes
    assert sum(row.flops for row in found.rows) == found.flops
    assert found.stream_us <= found.graph_us
    for row in found.rows:
        times = {"memory": row.memory_us, "compute": row.compute_us, "launch": row.launch_us, "link": row.link_us}
        assert row.limit_us == pytest.approx(max(times.values()))
        assert times[row.wall] == pytest.approx(row.limit_us)


@given(st.integers(1, 64), st.integers(0, 3000), st.sampled_from(["h200", "l4"]))
def test_more_work_is_never_faster(batch: int, context: int, gpu: str) -> None:
    one = explain("tiny", TINY, decode(batch, context, gpu))
    assert explain("tiny", TINY, decode(batch + 1, context, gpu)).graph_us >= one.graph_us
    longer = explain("tiny", TINY, decode(batch, context + 1, gpu))
    assert longer.bytes > one.bytes
    assert longer.memory.kv >= one.memory.kv  # whole pages
    assert one.memory.kv % (batch * 16) == 0


def test_prefill_is_compute_bound_and_decode_is_not() -> None:
    prefill = explain("qwen3-8b", QWEN_8B, Scenario(Step("prefill", 1, 4096), "h200"))
    assert prefill.stream_wall == "compute"
    products = 2 * 4096 * (QWEN_8B.num_parameters() - 2 * QWEN_8B.vocab_size * QWEN_8B.hidden_size)
    assert prefill.flops == pytest.approx(products, rel=0.1)
    assert prefill.tokens_per_s > 100 * explain("qwen3-8b", QWEN_8B, decode(context=4096)).tokens_per_s


def test_formats_take_the_bytes_that_they_take() -> None:
    before = explain("8b", QWEN_8B, decode(context=8192))
    head = QWEN_8B.vocab_size * QWEN_8B.hidden_size
    layers = before.weight_bytes // 2 - head
    half = explain("8b", QWEN_8B, decode(context=8192, weights="w4"))
    norms = before.weight_bytes - half.weight_bytes - layers * (2 - 0.5 - 4 / 128)
    assert 0 <= -norms < 3e6  # norm vectors stay as they are
    eight = explain("8b", QWEN_8B, decode(context=8192, head="w8"))
    assert before.bytes - eight.bytes == pytest.approx(head * (2 - 1 - 4 / 128), rel=1e-6)
    fp8 = explain("8b", QWEN_8B, decode(context=8192, kv="fp8"))
    assert before.bytes - fp8.bytes == before.kv_bytes // 2
    assert fp8.memory.kv == before.memory.kv // 2
    assert fp8.crossing == pytest.approx(2 * before.crossing)
    int8 = explain("8b", QWEN_8B, decode(context=8192, kv="int8"))
    assert int8.kv_bytes_per_token == pytest.approx(before.kv_bytes_per_token * (1 + 4 / 128) / 2)


def test_formats_leave_norms_and_residuals_alone() -> None:
    """Exact bytes of one layer's products, with weights of a byte and products in FP8."""
    found = explain("8b", QWEN_8B, decode(compute="fp8"))
    rows = {row.label: row for row in found.rows if row.label}
    hidden, layers = QWEN_8B.hidden_size, QWEN_8B.num_layers
    heads = (QWEN_8B.num_heads + 2 * QWEN_8B.num_kv_heads) * QWEN_8B.head_dim
    assert rows["qkv"].bytes == layers * (2 * hidden + 2 * hidden + hidden * heads + 2 * heads)  # norm, x, weight, out
    inner = QWEN_8B.intermediate_size
    assert rows["down"].bytes == layers * (inner + inner * hidden + 2 * 2 * hidden)  # x in FP8, residual in and out


def test_two_cards_read_half_each_and_talk() -> None:
    one, two = (explain("8b", QWEN_8B, replace(decode(context=1000), tp=tp)) for tp in (1, 2))
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=1e-3)
    assert two.memory.kv == one.memory.kv / 2
    reduces = [row for row in two.rows if row.operator == "all_reduce"]
    assert sum(row.calls for row in reduces) == 2 * QWEN_8B.num_layers + 1  # and the embedding's
    (gather,) = (row for row in two.rows if row.operator == "all_gather")
    assert gather.calls == 1
    assert all(row.link_us > 0 for row in [*reduces, gather])
    qkv, o = (
        {name: next(r for r in e.rows if r.label == label) for name, e in (("one", one), ("two", two))}
        for label in ("qkv", "o")
    )
    # By columns the input stays whole, by rows the output.
    hidden, q = QWEN_8B.hidden_size, QWEN_8B.num_heads * QWEN_8B.head_dim
    # One card runs the decoder whose products hold the norm and the sum, several the one with collectives between.
    norms = QWEN_8B.num_layers * 2 * hidden
    assert (qkv["one"].operator, qkv["two"].operator) == ("rms_norm_linear", "linear")
    assert qkv["two"].bytes - (qkv["one"].bytes - norms) // 2 == QWEN_8B.num_layers * hidden
    assert (o["one"].operator, o["two"].operator) == ("linear_add_", "linear")
    assert o["two"].bytes - (o["one"].bytes - norms) // 2 == QWEN_8B.num_layers * hidden  # a residual read too
    assert q == hidden
    assert not {"all_reduce", "all_gather"} & {row.operator for row in one.rows}
    tied, cut = (explain("0.6b", QWEN, replace(decode(), tp=tp)).memory.weights for tp in (1, 2))
    assert cut / tied == pytest.approx(0.5, rel=1e-3)
    halves = [explain("8b", QWEN_8B, replace(decode(), tp=tp)).memory.weights for tp in (1, 2)]
    assert halves[1] / halves[0] == pytest.approx(0.5, rel=1e-3)
    assert 1.7 < one.stream_us / two.stream_us < 2.01
    assert one.graph_us / two.graph_us < one.stream_us / two.stream_us
    with pytest.raises(ValueError, match="tp must divide the model's 8 KV heads, was 3"):
        explain("8b", QWEN_8B, replace(decode(), tp=3))


def test_what_does_not_fit_says_so_with_numbers() -> None:
    found = explain("8b", QWEN_8B, decode(64, 8192, "rtx4090"))
    assert not found.memory.fits
    assert found.memory.total > found.memory.card == 24e9
    assert 0 < found.memory.largest_batch < 64
    fitting = explain("8b", QWEN_8B, decode(found.memory.largest_batch, 8192, "rtx4090"))
    assert fitting.memory.fits
    wide = replace(QWEN_8B, num_layers=100, sliding_windows=(0,) * 100)
    assert explain("wide", wide, decode(gpu="l4")).memory.largest_batch == 0


def test_changes_one_by_one_and_together() -> None:
    changes = what_if("8b", QWEN_8B, decode(context=8192), "kv=fp8, weights=w4,batch=8")
    assert [change.what for change in changes] == ["kv=fp8", "weights=w4", "batch=8", "kv=fp8, weights=w4,batch=8"]
    prefill = what_if("8b", QWEN_8B, decode(), "phase=prefill,context=512")
    assert [change.what for change in prefill] == ["context=512", "phase=prefill,context=512"]
    assert all(change.gain > 1 for change in changes)
    assert changes[-1].gain > max(change.gain for change in changes[:-1])
    assert changes[-1].after.scenario == Scenario(Step("decode", 8, 8192), "h200", weights="w4", kv="fp8")
    (only,) = what_if("8b", QWEN_8B, decode(), "gpu=l4")
    assert only.gain < 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "foo=1",
            "what-if must be made of batch=, context=, phase=, gpu=, weights=, head=, kv=, compute=, tp=, had 'foo=1'",
        ),
        ("kv", "what-if must be made of .*, had 'kv'"),
        ("", "what-if must be made of .*, had ''"),
        ("compute=fp4", "compute must be one of fp8, int8, was 'fp4'"),
        ("gpu=a100,compute=fp8", "compute must be one of int8, was 'fp8'"),
        ("phase=prefill", "context must be from 1 to .* for this model's prefill, was 0"),
        ("kv=int3", "kv must be one of fp8, int8, was 'int3'"),
        ("weights=w3", "weights must be one of fp8, w8, w4, was 'w3'"),
        ("batch=many", "batch must be a whole number, was 'many'"),
        ("gpu=h300", "gpu must be one of .*, was 'h300'"),
        ("batch=0", "batch must be from 1 to .*, was 0"),
    ],
)
def test_changes_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        what_if("tiny", TINY, decode(), text)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("gpu", ["h200", "l4"])
def test_advice_comes_in_its_order_with_figures(phase: str, gpu: str) -> None:
    found = explain("8b", QWEN_8B, Scenario(Step(phase, 1, 4096), gpu))
    advice = advise(QWEN_8B, found)
    assert tuple(piece.step for piece in advice) == STEPS
    assert all(any(c.isdigit() for c in piece.text) for piece in advice if piece.step != "precision")
    assert all(piece.gain >= 1 for piece in advice)


def test_a_model_that_must_be_cut_is_told_so() -> None:
    config = replace(QWEN_8B, num_layers=60, sliding_windows=(0,) * 60)
    text = advise(config, explain("wide", config, decode(gpu="rtx4090")))[1].text
    assert text.startswith("It has to be cut: 25.")
    text = advise(QWEN_8B, explain("8b", QWEN_8B, decode(64, 8192, "rtx4090")))[1].text
    assert "It has to be cut" not in text  # a smaller batch fits
    assert "Even then it does not fit: at most" in text


def test_advice_agrees_with_the_wall() -> None:
    launch = explain("tiny", replace(TINY, num_layers=1, sliding_windows=(0,)), decode())
    assert f"The step is {launch.stream_wall}-bound" in advise(TINY, launch)[0].text
    many = explain("8b", QWEN_8B, decode(256, 0, "rtx4090"))
    assert many.stream_wall == "compute"
    assert many.flops / many.bytes > many.ridge
    texts = [piece.text for piece in advise(QWEN_8B, many)]
    assert texts[0].startswith("The step is compute-bound")
    assert "compute=fp8 1." in texts[2]
    assert "it is not in the way" in texts[3]
    full = explain("tiny", TINY, decode(1_000_000, 10))
    assert "instead of" not in advise(TINY, full)[0].text


@given(st.integers(1, 4096), st.integers(0, 4000), st.sampled_from(["h200", "l4", "b200"]))
def test_the_ridge_parts_compute_from_memory(batch: int, context: int, gpu: str) -> None:
    found = explain("0.6b", QWEN, decode(batch, context, gpu))
    if found.stream_wall == "compute":
        assert found.flops / found.bytes >= found.ridge * 0.98
    if found.stream_wall == "memory":
        assert found.flops / found.bytes <= found.ridge * 1.02


@given(st.integers(1, 3000), st.integers(0, 20_000), st.sampled_from(["h200", "l4"]))
def test_what_fits_is_at_most_the_largest_batch(batch: int, context: int, gpu: str) -> None:
    memory = explain("0.6b", QWEN, decode(batch, context, gpu)).memory
    assert memory.fits == (batch <= memory.largest_batch)
    if memory.fits:
        assert memory.total < memory.card


def test_windows_bound_the_crossing() -> None:
    windowed = replace(QWEN, sliding_windows=(1024,) * 28)
    assert explain("w", windowed, decode()).crossing is None
    half = explain("h", replace(QWEN, sliding_windows=(1024,) * 14 + (0,) * 14), decode())
    assert half.crossing == pytest.approx(2 * 10_394 - 1024, abs=2)


def test_fp8_products_halve_what_stands_at_the_compute_wall() -> None:
    before = explain("8b", QWEN_8B, Scenario(Step("prefill", 1, 8192), "h200"))
    after = explain("8b", QWEN_8B, Scenario(Step("prefill", 1, 8192), "h200", compute="fp8"))
    assert 1.3 < before.stream_us / after.stream_us < 2
    assert after.weight_bytes < 0.6 * before.weight_bytes


def test_large_batches_are_quick() -> None:
    start = time.process_time()
    found = explain("8b", QWEN_8B, decode(100_000, 40_000))
    advise(QWEN_8B, found)
    assert time.process_time() - start < 6


def test_data_is_complete() -> None:
    found = explain("tiny", TINY, decode())
    data = found.as_data()
    assert isinstance(found, Explanation)
    assert data["memory"]["total"] == found.memory.total
    assert data["card"]["name"] == ceilings("h200").name
    assert len(data["rows"]) == len(found.rows)
    assert data["tokens_per_s"] == found.tokens_per_s
    assert explain("tiny", replace(TINY, dtype=torch.bfloat16), decode()).dtype == "bf16"


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0, 1, 3, 16, 100]))
def test_pairs_in_closed_form(length: int, rows: int, window: int) -> None:
    rows = min(rows, length)
    ends = range(length - rows + 1, length + 1)
    expected = sum(min(end, window) if window else end for end in ends)
    assert _seen(length, window) - _seen(length - rows, window) == expected
