"""Decode attention with its step: equal to its two parts one after the other, and what it writes where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflight import ops
from rooflight.ops import AttentionMeta
from tests.contract.harness import Target, argument, copy_args, implementations, same_bits, sweep_args

steps = implementations("qk_norm_rope_attention_")
Named = dict[str, Any]


def given_of(target: Target, dtype: torch.dtype, **dims: Any) -> Named:
    """Arguments by name on the target's device, of caches whose other slots hold NaN; so does `out`."""
    args = copy_args(sweep_args(target.op, dims, dtype, dims.pop("seed", 0)), target.device)
    named = target.op.bind(*args)
    named["out"].fill_(float("nan"))
    return named


def copied(named: Named) -> Named:
    return dict(zip(named, copy_args(tuple(named.values()), named["q"].device), strict=True))


def in_two(target: Target, named: Named) -> Named:
    """What `qk_norm_rope_cache_` and `decode_attention` of the same provider make of copies."""
    named = copied(named)
    q = named["q"].clone(memory_format=torch.contiguous_format)
    heads = [named[name] for name in ("k", "v", "q_weight", "k_weight", "cos_sin", "positions", "slots")]
    caches = named["k_cache"], named["v_cache"]
    rest = {"interleaved": named["interleaved"], "backend": target.provider}
    ops.qk_norm_rope_cache_(q, *heads, *caches, named["eps"], **rest)
    lengths = named["seq_lens"]
    meta = AttentionMeta(
        named["block_table"], lengths, lengths, 1, named["max_seq_len"], splits=named["splits"]
    )  # fmt: skip
    rest = {"scale": named["scale"], "window": named["window"], "backend": target.provider}
    return named | {"out": ops.decode_attention(q, *caches, meta, **rest)}


def check_equals_two(target: Target, named: Named) -> Named:
    """In bits, where it is the two; a kernel of its own may sum a norm in another order. Returns what it got."""
    expected, got = in_two(target, named), copied(named)
    target.overload(*got.values())
    for name in ("q", "k", "v", "block_table", "seq_lens", "slots", "positions", "cos_sin"):
        assert same_bits(got[name], named[name]), name
    bits = 4 * torch.finfo(got["q"].dtype).eps if target.provider == "cuda" else 0.0
    torch.testing.assert_close(got["out"], expected["out"], rtol=bits, atol=bits)
    new = named["slots"][named["slots"] >= 0]
    for name in ("k_cache", "v_cache"):
        one, other, before = (by_slot(each[name]) for each in (got, expected, named))
        torch.testing.assert_close(one[new], other[new], rtol=bits, atol=bits)
        rest = torch.ones(len(one), dtype=torch.bool, device=one.device)
        rest[new] = False
        assert same_bits(one[rest], before[rest]), f"{name}: another slot was written"
    return got


def by_slot(cache: torch.Tensor) -> torch.Tensor:
    """(slots, num_kv_heads, head_dim)"""
    return cache.transpose(1, 2).flatten(0, 1)


@st.composite
def dims_of(draw: Callable[..., Any]) -> dict[str, Any]:
    kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([64, 80, 128, 256]))
    return {
        "seq_lens": tuple(draw(st.lists(st.one_of(st.just(0), st.integers(1, 140)), min_size=1, max_size=3))),
        "num_heads": kv_heads * draw(st.integers(1, 20)),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": draw(st.sampled_from([5, 8, 16, 32])),
        "window": draw(st.sampled_from([0, 0, 1, 7, 16, 33, 200])),
        "splits": draw(st.sampled_from([0, 0, 1, 2, 3, 16])),
        "norm": draw(st.booleans()),
        "rotary_dim": draw(st.sampled_from([head_dim, head_dim, head_dim // 2, 16])),
        "interleaved": draw(st.sampled_from([False, False, True])),
        "seed": draw(st.integers(0, 3)),
    }


@steps
def test_equals_the_two_one_after_the_other(target: Target) -> None:
    """Of any heads, groups, pages, windows, parts, norms and rotations."""

    # Triton compiles each of them, or interprets it in seconds.
    @settings(max_examples={"ref": 60, "triton": 12, "cuda": 200}[target.provider])
    @given(dims_of(), st.sampled_from(target.op.dtypes))
    def check(dims: dict[str, Any], dtype: torch.dtype) -> None:
        got = check_equals_two(target, given_of(target, dtype, **dims))
        assert got["out"].isfinite().all()
        for row, length in enumerate(dims["seq_lens"]):
            assert length or got["out"][row].eq(0).all()

    check()


@pytest.mark.parametrize("group", range(1, 21))
@implementations("qk_norm_rope_attention_")
def test_any_number_of_query_heads_a_kv_head(target: Target, group: int) -> None:
    """Several kernels' blocks share a KV head then: one of them writes its key."""
    if target.provider == "triton" and group % 4:
        pytest.skip("every fourth in Triton, which compiles or interprets each")
    for dtype in target.op.dtypes:
        dims = {"seq_lens": (33, 0, 16), "num_heads": 2 * group, "num_kv_heads": 2, "head_dim": 128}
        check_equals_two(target, given_of(target, dtype, **dims))


@steps
def test_a_padded_row_gives_zeros_and_writes_nothing(target: Target) -> None:
    """Length 0 and slot -1: the very last slot keeps its bytes, though a page of the table would have room."""
    for dtype in target.op.dtypes:
        named = given_of(target, dtype, seq_lens=(7, 20, 40))
        named["slots"][1], named["seq_lens"][1] = -1, 0
        got = check_equals_two(target, named)
        assert got["out"][1].eq(0).all()
        written = [by_slot(got[name])[named["slots"][[0, 2]]].isfinite().all() for name in ("k_cache", "v_cache")]
        assert all(written)
        none = given_of(target, dtype, seq_lens=(7, 20, 40))
        none["slots"].fill_(-1)
        none["seq_lens"].zero_()
        got = check_equals_two(target, none)
        assert got["out"].eq(0).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
@steps
def test_nan_stays_in_its_sequence_and_kv_head(target: Target, name: str) -> None:
    for dtype in target.op.dtypes:
        named = given_of(target, dtype, seq_lens=(40, 17, 5), num_heads=6, num_kv_heads=2)
        clean = copied(named)
        target.overload(*clean.values())
        named[name][1, 0, 3] = float("nan")
        target.overload(*named.values())
        touched = torch.zeros(3, 6, dtype=torch.bool, device=target.device)
        touched[1, : 1 if name == "q" else 3] = True
        assert same_bits(named["out"][~touched], clean["out"][~touched])
        assert named["out"][touched].isnan().any(-1).all()


@steps
def test_norm_weights_of_float32(target: Target) -> None:
    for dtype in target.op.dtypes:
        named = given_of(target, dtype, seq_lens=(40, 17, 5), head_dim=128)
        for name in ("q_weight", "k_weight"):
            named[name] = named[name].float() + 2**-12
        check_equals_two(target, named)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    buffer = x.new_full((x.numel() + 1,), float("nan"))
    return buffer[1:].view(x.shape).copy_(x)


def every_other_head(x: torch.Tensor) -> torch.Tensor:
    buffer = x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2]), float("nan"))
    return buffer[:, ::2].copy_(x)


def one_row_for_all(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def heads_apart(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", [unaligned, every_other_head, one_row_for_all, heads_apart])
@steps
def test_heads_as_they_lie(target: Target, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The query, or all that is given, or the result; of every head and page that kernels of their own take."""
    for dtype in target.op.dtypes:
        for head_dim, page_size in ((64, 16), (128, 16), (128, 8)):
            dims = {"seq_lens": (40, 17), "head_dim": head_dim, "page_size": page_size}
            for names in (("q",), ("q", "k", "v"), ("out",), ("out", "q")):
                if layout is one_row_for_all and "out" in names:
                    continue
                named = given_of(target, dtype, **dims)
                named |= {name: layout(named[name]) for name in names}
                check_equals_two(target, named)


@steps
def test_each_token_sees_the_one_before_it(target: Target) -> None:
    """Twenty tokens one by one over a page border, against the two."""
    dtype = target.op.dtypes[-1]
    named = given_of(target, dtype, seq_lens=(34, 27))
    lengths = torch.tensor([14, 7], dtype=torch.int32, device=target.device)
    for _ in range(20):
        lengths += 1
        named["positions"], named["seq_lens"] = lengths.long() - 1, lengths
        named["slots"] = slots_of(named["block_table"], lengths)
        got = check_equals_two(target, named)
        named |= {name: got[name] for name in ("k_cache", "v_cache")}


def slots_of(table: torch.Tensor, lengths: torch.Tensor, page_size: int = 16) -> torch.Tensor:
    last = lengths.long() - 1
    return table.gather(1, (last // page_size)[:, None]).long()[:, 0] * page_size + last % page_size


def test_an_expanded_result_is_refused_and_nothing_written() -> None:
    operator = ops.REGISTRY["qk_norm_rope_attention_"]
    args = sweep_args(operator, {"seq_lens": (1, 3)})
    before = copy_args(args)
    bad = (argument(operator, args, "out")[:1].expand(2, -1, -1), *args[1:])
    with pytest.raises(ValueError, match=r"^out must not be expanded"):
        operator.providers["ref"](*bad)
    assert all(same_bits(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))


def test_what_triton_cannot_attend_is_not_written_either() -> None:
    operator = ops.REGISTRY["qk_norm_rope_attention_"]
    if "triton" not in operator.providers or torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    args = sweep_args(operator, {"seq_lens": (3,), "num_heads": 129, "num_kv_heads": 1})
    before = copy_args(args)
    with pytest.raises(ValueError, match=r"^q must have at most 128 heads a KV head"):
        operator.providers["triton"](*args)
    assert all(same_bits(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))


# In a graph, where kernels begin while those before them end ---------------------------------------------------------

HEADS, KV_HEADS, DIM, WIDTH, PAGE = 16, 8, 128, 1024, 16


class Layers:
    """Three layers of products, attention and sums for a batch, as a decoder has them, on caches of random tokens."""

    def __init__(self, batch: int, context: int, page_size: int = PAGE) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device="cuda", generator=generator) * scale).bfloat16()

        heads, rows = (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM
        self.page_size, pages = page_size, -(-(context + 8) // page_size)
        self.weights = [
            (randn(WIDTH), randn(heads, WIDTH, scale=WIDTH**-0.5), randn(WIDTH, rows, scale=rows**-0.5))
            for _ in range(3)
        ]
        self.norms = randn(DIM), randn(DIM)
        shape = batch * pages, KV_HEADS, page_size, DIM
        self.caches = [(randn(*shape), randn(*shape)) for _ in range(3)]
        order = torch.randperm(batch * pages, device="cuda", generator=generator)
        self.table = order.view(batch, pages).int()
        self.cos_sin = torch.randn(context + 8, DIM, device="cuda", generator=generator)
        self.residual = randn(batch, WIDTH)
        self.lengths = torch.full((batch,), context + 1, dtype=torch.int32, device="cuda")
        self.positions = self.lengths.long() - 1
        self.slots = slots_of(self.table, self.lengths, page_size)
        longs = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.host = [longs.clone() for _ in range(3)]  # tokens, ids, places
        self.num_tokens, self.limits = self.lengths.long(), longs + context + 8
        self.last, self.history = longs.clone(), torch.zeros(8, batch, dtype=torch.int64, device="cuda")
        moving = self.residual, self.lengths, self.positions, self.slots, self.num_tokens
        self.state = [*moving, *(cache for pair in self.caches for cache in pair)]
        self.begin = [tensor.clone() for tensor in self.state]

    def reset(self) -> None:
        for tensor, value in zip(self.state, self.begin, strict=True):
            tensor.copy_(value)

    def meta(self) -> AttentionMeta:
        return AttentionMeta(self.table, self.lengths, self.lengths, 1, self.cos_sin.shape[0])

    def token(self, step: int) -> None:
        meta = self.meta()
        for (norm, qkv, o), caches in zip(self.weights, self.caches, strict=True):
            packed = ops.rms_norm_linear(self.residual, norm, qkv).unflatten(1, (-1, DIM))
            q, k, v = packed.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            rest = *self.norms, self.cos_sin, self.positions, self.slots, *caches
            ops.qk_norm_rope_attention_(out, q, k, v, *rest, meta, backend="cuda")
            ops.linear_add_(self.residual, out.flatten(1), o)
        tokens, ids, places = self.host
        moved = ids, self.positions, self.num_tokens, self.lengths, self.slots, self.last, self.history
        ops.advance_decode_(tokens, *moved, self.table, self.limits, places, self.page_size, step)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def check_replays(layers: Layers, run: Callable[[], None], times: int = 50) -> None:
    """Every replay leaves the bits that the calls one by one leave."""
    graph = captured(run)
    layers.reset()
    run()
    torch.cuda.synchronize()
    expected = [tensor.clone() for tensor in layers.state]
    for _ in range(times):
        layers.reset()
        graph.replay()
        assert all(map(same_bits, layers.state, expected))


needs_cuda = pytest.mark.skipif("cuda" not in ops.REGISTRY["qk_norm_rope_attention_"].providers, reason="no kernels")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("batch", "context"), [(1, 0), (1, 14), (1, 127), (1, 3000), (4, 1000), (40, 300)])
@pytest.mark.parametrize("page_size", [16, 8])
@torch.inference_mode()
def test_consecutive_tokens_of_layers_in_one_graph(batch: int, context: int, page_size: int) -> None:
    """Programmatic launch: attention asks for keys before the product in front of it ends, and finds all of them."""
    layers = Layers(batch, context, page_size)
    check_replays(layers, lambda: [layers.token(step) for step in range(6)])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("batch", "context"), [(1, 20), (1, 3000), (8, 300)])
@torch.inference_mode()
def test_two_tokens_of_one_cache_with_nothing_between(batch: int, context: int) -> None:
    """The second call's kernel begins while the first one's ends, and sees its key."""
    layers = Layers(batch, context)
    generator = torch.Generator("cuda").manual_seed(1)
    heads = torch.randn(2, batch, HEADS + 2 * KV_HEADS, DIM, device="cuda", generator=generator).bfloat16()
    later = layers.lengths + 1
    outs = torch.zeros(2, batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    layers.state.append(outs)
    layers.begin.append(outs.clone())
    caches = layers.caches[0]
    slots = slots_of(layers.table, later)

    def run() -> None:
        for index, (lengths, place) in enumerate(((layers.lengths, layers.slots), (later, slots))):
            q, k, v = heads[index].split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
            meta = AttentionMeta(layers.table, lengths, lengths, 1, layers.cos_sin.shape[0])
            rest = *layers.norms, layers.cos_sin, layers.positions, place, *caches
            ops.qk_norm_rope_attention_(outs[index], q, k, v, *rest, meta, backend="cuda")

    check_replays(layers, run)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("between", [False, True])
@torch.inference_mode()
def test_keys_that_another_kernel_of_the_graph_has_just_written(between: bool) -> None:
    """`qk_norm_rope_cache_` lets the next kernel start at once: attention must not read the cache before it is written.

    Not even behind a third kernel, which itself begins while the first one still writes.
    """
    batch, tokens = 1, 2048
    layers = Layers(batch, tokens)
    generator = torch.Generator("cuda").manual_seed(1)
    heads = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", generator=generator).bfloat16()
    caches = layers.caches[0]
    positions = torch.arange(tokens, device="cuda")
    slots = layers.table[0, positions // PAGE].long() * PAGE + positions % PAGE
    norm, qkv, _ = layers.weights[0]
    out = torch.zeros(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    layers.state.append(out)
    layers.begin.append(out.clone())
    work = heads.clone()

    def run() -> None:
        work.copy_(heads)
        q, k, v = work.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
        rest = *layers.norms, layers.cos_sin
        first = ops.rms_norm_linear(layers.residual, norm, qkv)
        ops.qk_norm_rope_cache_(q, k, v, *rest, positions, slots, *caches, backend="cuda")
        packed = ops.rms_norm_linear(layers.residual, norm, qkv) if between else first
        split = packed.unflatten(1, (-1, DIM)).split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
        places = layers.positions, layers.slots, *caches
        ops.qk_norm_rope_attention_(out, *split, *rest, *places, layers.meta(), backend="cuda")

    check_replays(layers, run)
