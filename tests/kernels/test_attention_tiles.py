"""The attention kernels where their tiles meet something: borders, padding, sequences without new tokens.

Decode attention in Triton alone; that in CUDA has no tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rooflight.ops import REGISTRY, AttentionMeta, Make, prefill_attention, prefill_attention_lse
from tests.contract.harness import assert_right, copy_args, expect, same_bits

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    "triton" not in REGISTRY["prefill_attention"].providers, reason="no Triton provider on this machine"
)
PREFILLS = [
    name
    for name in ("triton", "cuda")
    if name in REGISTRY["prefill_attention"].providers and DEVICE in REGISTRY["prefill_attention"].serves[name]
]
prefills = pytest.mark.parametrize("provider", PREFILLS)


def inputs(seq_lens: Sequence[int], query_lens: Sequence[int], **dims: int) -> tuple[Any, ...]:
    make = Make(torch.bfloat16)
    return REGISTRY["prefill_attention"].inputs(make, seq_lens=seq_lens, query_lens=query_lens, **dims)


def check(provider: str, args: tuple[Any, ...]) -> None:
    operator = REGISTRY["prefill_attention"]
    results = operator.providers[provider](*copy_args(args, DEVICE))
    assert_right(expect(operator, args), results)


# Rows of a tile over two heads a KV head; on a GPU 64 or more of them and 64 keys, in the interpreter half or less.
BORDERS = [32, 64, 96] if torch.cuda.is_available() else [32]


@prefills
@pytest.mark.parametrize("beyond", [None, 0, 8])
@pytest.mark.parametrize("border", BORDERS)
def test_tiles_that_end_at_a_border(border: int, beyond: int | None, provider: str) -> None:
    """One token and one key less than a tile, exactly one, and one more, alone and behind a prefix.

    With windows as wide as a tile of keys and wider: their edges, too, cross a border within a tile of queries.
    """
    window = 0 if beyond is None else border + beyond
    queries = (border - 1, border, border + 1, 2 * border + border // 3)
    check(provider, inputs((*queries[:3], 3 * border), queries, window=window))


@prefills
def test_sequences_without_new_tokens_between_others(provider: str) -> None:
    """Padded places of a batch: their lengths, and how many there are, move no other sequence's tile."""
    check(provider, inputs((5, 40, 0, 33, 40, 17, 1), (5, 0, 0, 33, 0, 3, 0)))


@prefills
def test_a_padded_graph_serves_every_length(provider: str) -> None:
    """A fixed number of rows and sequences, as in a graph: rows of sequences as they are alone, the rest zeros."""
    rows, places = 96, 6
    for lens, queries in (((90,), (90,)), ((9, 50), (9, 17)), ((), ())):
        q, k_cache, v_cache, table, lengths, starts, *_ = inputs(lens, queries)
        exact = prefill_attention_lse(*on_device(q, k_cache, v_cache), meta(table, lengths, starts), backend=provider)
        room = torch.full((rows, *q.shape[1:]), float("nan"), dtype=q.dtype)
        room[: len(q)] = q
        more = places - len(lens)
        padded = (
            torch.cat((table, torch.full((more, table.shape[1]), 1 << 30, dtype=torch.int32))),
            torch.cat((lengths, torch.zeros(more, dtype=torch.int32))),
            torch.cat((starts, starts[-1:].expand(more))),
        )
        results = prefill_attention_lse(*on_device(room, k_cache, v_cache), meta(*padded), backend=provider)
        for one, other, empty in zip(exact, results, (0.0, float("-inf")), strict=True):
            assert same_bits(one, other[: len(q)])
            assert other[len(q) :].eq(empty).all()


@prefills
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_br_026_chunks_have_the_bits_of_the_whole(chunk: int, window: int, provider: str) -> None:
    """Key tiles lie at the same places whatever the chunk, so a prompt's cut leaves no trace at all."""
    tokens = 75
    q, k_cache, v_cache, table, *_ = inputs((tokens,), (tokens,))
    q, k_cache, v_cache = on_device(q, k_cache, v_cache)

    def run(start: int, end: int) -> torch.Tensor:
        lengths = torch.tensor([end], dtype=torch.int32)
        own = meta(table, lengths, torch.tensor([0, end - start], dtype=torch.int32))
        return prefill_attention(q[start:end], k_cache, v_cache, own, window=window, backend=provider)

    chunks = [run(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
    assert same_bits(torch.cat(chunks), run(0, tokens))


@prefills
@pytest.mark.skipif(DEVICE == "cpu", reason="tiles have one size in the interpreter")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [0, 40])
def test_tiles_of_every_size_give_the_same_bits(window: int, head_dim: int, provider: str) -> None:
    """How large a tile is follows from how many tokens and sequences there are, new ones and old."""
    dims = {"num_heads": 16, "num_kv_heads": 8, "head_dim": head_dim}
    q, k_cache, v_cache, table, lengths, *_ = copy_args(inputs((1100,), (1000,), **dims), DEVICE)

    def run(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last tokens of the sequence, so many of them, as several sequences with the same keys."""
        begins = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        many = meta(table.repeat(len(counts), 1), lengths.repeat(len(counts)), begins)
        rows = torch.cat([q[-count:] for count in counts])
        return prefill_attention_lse(rows, k_cache, v_cache, many, window=window, backend=provider)

    whole = run(1000)
    for counts in ((20,), (130,), (20,) * 40, (1000, *(1,) * 100), (130,) * 60, (1000,) * 5, (1000,) * 40):
        for one, other in zip(whole, run(*counts), strict=True):
            assert same_bits(torch.cat([one[-count:] for count in counts]), other)


@prefills
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale: float, provider: str) -> None:
    """A negative one too, whose largest score comes from the smallest product."""
    args = inputs((70,), (40,))
    place = [a.name for a in REGISTRY["prefill_attention"].arguments].index("scale")
    check(provider, (*args[:place], scale, *args[place + 1 :]))


@prefills
@pytest.mark.parametrize("page_size", [1, 7, 32, 48])
def test_pages_of_any_size(page_size: int, provider: str) -> None:
    check(provider, inputs((75, 20), (41, 20), page_size=page_size))


@prefills
def test_more_heads_than_a_small_tile_has_rows(provider: str) -> None:
    check(provider, inputs((37,), (5,), num_heads=48, num_kv_heads=1))
    check(provider, inputs((37,), (5,), num_heads=96, num_kv_heads=1))
    args = copy_args(inputs((3,), (3,), num_heads=129, num_kv_heads=1), DEVICE)
    with pytest.raises(
        ValueError, match=rf"^q must have at most 128 heads a KV head for the {provider} provider, was 129"
    ):
        REGISTRY["prefill_attention"].providers[provider](*args)


@pytest.mark.parametrize("splits", [1, 3, 64])
@pytest.mark.parametrize("window", [0, 33, 70])
def test_decode_in_any_number_of_parts(splits: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part, which needs no merge, fewer parts than tiles, and more: then most of them hold no key."""
    from rooflight.kernels.triton import decode_attention

    monkeypatch.setattr(decode_attention, "_splits", lambda q, num_kv_heads: splits)
    operator = REGISTRY["decode_attention"]
    dims = {"num_heads": 3, "num_kv_heads": 1, "window": window}
    args = operator.inputs(Make(torch.bfloat16), seq_lens=(0, 1, 31, 32, 33, 64, 200), **dims)
    results = operator.providers["triton"](*copy_args(args, DEVICE))
    assert_right(expect(operator, args), results)


def test_most_parts_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of so many parts, where the rule would take more; the rule's own where it takes fewer."""
    from rooflight.kernels.triton import decode_attention

    operator = REGISTRY["decode_attention"]

    def run(rule: int, splits: int) -> torch.Tensor:
        monkeypatch.setattr(decode_attention, "_splits", lambda q, num_kv_heads: rule)
        args = operator.inputs(Make(torch.float32), seq_lens=(200, 33), splits=splits)
        result: torch.Tensor = operator.providers["triton"](*copy_args(args, DEVICE))[0]
        return result

    for most in (1, 2, 3):
        assert same_bits(run(4, most), run(most, 0))
        assert not same_bits(run(4, most), run(4, 0))
    assert same_bits(run(4, 64), run(4, 0))


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def meta(table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor) -> AttentionMeta:
    return AttentionMeta(*on_device(table, lengths, starts), 1, 1)
