"""Parts of decode attention: the rule is the kernel's, what is asked for arrives, and the loss is against the best."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.bench import decode_parts, results
from rooflight.bench.decode_parts import PARTS, PartsReport, blocks_of, measure, row_of, rule
from rooflight.bench.measurement import Spread
from rooflight.limits.trace import Step
from rooflight.models.load import load_config
from rooflight.ops.contract import _forced
from tests.bench.fake_device import NODE_US, FakeDevice

BF16 = replace(load_config("random:tiny"), dtype=torch.bfloat16)
QWEN = load_config("random:qwen3-0.6b")
CSRC = Path(__file__).parents[2] / "csrc"


def test_the_rule_by_hand() -> None:
    """132 multiprocessors, 8 blocks a sequence: doubled while twice as many find a place, pairs up to 132 blocks."""
    taken = {batch: rule(blocks_of(QWEN, batch), 132) for batch in (1, 2, 4, 8, 9, 16, 17, 64)}
    assert taken == {1: 16, 2: 8, 4: 4, 8: 2, 9: 2, 16: 2, 17: 1, 64: 1}
    assert rule(1, 132) == 16
    assert rule(66, 132) == rule(132, 132) == 2
    assert rule(133, 132) == 1


def test_the_rule_is_that_of_the_kernel() -> None:
    source = (CSRC / "decode_attention.cu").read_text()
    body = source[source.index("int decode_splits(") :].partition("\n}\n")[0]
    code = " ".join(line.partition("//")[0].strip() for line in body.splitlines()[1:])
    assert re.sub(r"\s+", " ", code) == (
        "const int64_t places = card().multiprocessors; int splits = 1; "
        "while (splits < kMostSplits && blocks * splits * 2 <= places) splits *= 2; "
        " return splits == 1 && pairs_share && blocks <= places ? 2 : splits;".replace("  ", " ")
    )
    assert f"kMostSplits = {PARTS[-1]};" in (CSRC / "decode_attention_cluster.cuh").read_text()
    assert f"kHeads = {decode_parts.HEADS_OF_A_BLOCK};" in (CSRC / "decode_attention_chunks.cuh").read_text()


def test_query_heads_of_a_kv_head_share_blocks() -> None:
    assert blocks_of(QWEN, 3) == 3 * 8
    assert blocks_of(replace(QWEN, num_heads=72), 1) == 8 * 2  # nine heads are two blocks


def test_the_loss_is_against_the_best() -> None:
    us = {"0": 12.0, "1": 30.0, "2": 20.0, "4": 10.0, "8": 11.9, "16": 15.0}
    row = row_of(2, 128, 16, 132, {parts: Spread(time, time, time) for parts, time in us.items()})
    assert (row.rule, row.best) == (8, 4)
    assert row.loss == pytest.approx(0.2)
    same = {**us, "8": 9.0}
    assert row_of(2, 128, 16, 132, {p: Spread(t, t, t) for p, t in same.items()}).loss == 0


def fakes(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, refused: int = -1) -> list[tuple[Any, ...]]:
    """The operator takes 10 us over the number of parts, and 3 by the rule; what it was called with."""
    seen: list[tuple[Any, ...]] = []
    original = ops.qk_norm_rope_attention_

    def attention(out: torch.Tensor, *args: Any, **options: Any) -> None:
        if out.is_meta:  # traced
            return original(out, *args, **options)
        (meta,) = (a for a in args if isinstance(a, ops.AttentionMeta))
        seen.append((out.shape[0], meta.max_seq_len, meta.splits, _forced["backend"]))
        if meta.splits == refused:
            raise RuntimeError("too many blocks")
        device.launch({}, fixed_us=10 / meta.splits if meta.splits else 3.0)
        return None

    monkeypatch.setattr(ops, "qk_norm_rope_attention_", attention)
    monkeypatch.setattr(decode_parts, "BATCHES", (1, 16))
    monkeypatch.setattr(decode_parts, "CONTEXTS", (20, 40))
    return seen


def test_every_number_of_parts_is_asked_for_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(l2_bytes=1000)
    seen = fakes(device, monkeypatch)
    rows = measure(BF16, 132, device, lambda *_: None)
    assert [(row.batch, row.context) for row in rows] == [(1, 20), (1, 40), (16, 20), (16, 40)]
    assert {(splits, backend) for *_, splits, backend in seen} == {(n, "cuda") for n in (0, *PARTS)}
    assert {(batch, length) for batch, length, *_ in seen} == {(1, 21), (1, 41), (16, 21), (16, 41)}
    for row in rows:
        assert list(row.us) == ["0", "1", "2", "4", "8", "16"]
        for parts in PARTS:
            assert row.us[str(parts)].median == pytest.approx(NODE_US + 10 / parts, rel=0.02)
        assert row.blocks == row.batch * BF16.num_kv_heads
        assert (row.rule, row.best) == (rule(row.blocks, 132), 16)
        assert row.loss == pytest.approx(0 if row.rule == 16 else (NODE_US + 3) / (NODE_US + 10 / 16) - 1, rel=0.02)
    assert rows[-1].loss > 1


def test_a_number_that_is_refused_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(l2_bytes=1000)
    fakes(device, monkeypatch, refused=8)
    with pytest.raises(ValueError, match=r"^8 parts: too many blocks$"):
        measure(BF16, 132, device, lambda *_: None)


def test_results(tmp_path: Path) -> None:
    us = {str(parts): Spread(4.0 + parts, 4.0, 9.0) for parts in (0, *PARTS)}
    report = PartsReport("a model", {"device": "NVIDIA Test 1"}, 132, (row_of(8, 128, 64, 132, us),))
    data = report.as_data()
    assert (data["benchmark"], data["multiprocessors"]) == ("decode_parts", 132)
    _, table = results.write(tmp_path, "decode_parts", data)
    header, line = table.read_text().splitlines()
    assert header.startswith("batch,context,blocks,rule,best,loss,us.0.median,us.0.low,us.0.high,us.1.median")
    assert line.startswith(f"8,128,64,2,1,{4 / 5 - 1},4.0,4.0,9.0,5.0,")


def test_steps_are_those_of_decode() -> None:
    for batch in decode_parts.BATCHES:
        for context in decode_parts.CONTEXTS:
            Step("decode", batch, context).check(QWEN)
