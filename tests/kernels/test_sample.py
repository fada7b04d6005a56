"""sample in Triton: its chunks, candidates and searches, made small so that short rows pass through all of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rooflight import ops
from rooflight.kernels.triton import sample as kernel
from rooflight.ops import Make
from rooflight.ops.sample import SAMPLE

# NumPy speaks up in Triton's interpreter where logits are so far apart that FP32 is infinite.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = [  # temperature, top_k, top_p, min_p
    (0.0, 3, 0.5, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 7, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 0, 0.3, 0.0),
    (2.0, 0, 0.97, 0.0),
    (0.8, 40, 0.9, 0.05),
    (1.0, 600, 0.7, 0.0),
    (5.0, 650, 0.99, 0.3),
    (1.0, 0, 0.0, 0.0),
    (1e-3, 699, 0.999999, 0.0),
]


def arguments(vocab_size: int, kind: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """One row for each of OPTIONS."""
    rows, generator = len(OPTIONS), torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    if kind == "equals":
        logits = logits.round()
    elif kind == "all equal":
        logits = torch.zeros_like(logits)
    elif kind == "mostly banned":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = float("-inf")
        logits[:, vocab_size // 2] = 1.0
    elif kind == "one far below":
        logits[:, 3] = torch.finfo(torch.float32).min
    elif kind == "huge":
        logits *= 1e37
    columns = zip(zip(*OPTIONS, strict=True), (torch.float32, torch.int32, torch.float32, torch.float32), strict=True)
    parameters = [torch.tensor(values, dtype=dtype) for values, dtype in columns]
    return logits, *parameters, torch.arange(rows) * 77 - 5, torch.arange(rows) + seed


KINDS = ["plain", "equals", "all equal", "mostly banned", "one far below", "huge"]


@pytest.mark.parametrize("capacity", [4096, 16, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_small_chunks_and_few_candidates(monkeypatch: pytest.MonkeyPatch, kind: str, capacity: int) -> None:
    """700 tokens in six chunks; with little room for candidates the search walks the row itself."""
    monkeypatch.setattr(kernel, "LEAST_CHUNK", 128)
    monkeypatch.setattr(kernel, "CAPACITY", capacity)
    args = arguments(700, kind)
    expected = SAMPLE.composition(*args, compute=torch.float64)
    tokens = ops.sample(*(x.to(DEVICE) for x in args), backend="triton")
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("programs", [1, 24, 48])
def test_programs_share_chunks_in_any_way(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """A program for a row, for some of its chunks (the last one for fewer), for one each: the same tokens."""
    monkeypatch.setattr(kernel, "LEAST_CHUNK", 128)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    args = arguments(600, "plain", seed=1)
    expected = SAMPLE.composition(*args, compute=torch.float64)
    tokens = ops.sample(*(x.to(DEVICE) for x in args), backend="triton")
    assert tokens.tolist() == expected.tolist()


def test_chunks_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MOST_CHUNKS of a row, each of several tiles."""
    monkeypatch.setattr(kernel, "LEAST_CHUNK", 128)
    monkeypatch.setattr(kernel, "MOST_CHUNKS", 2)
    monkeypatch.setattr(kernel, "TILE", 128)
    args = arguments(700, "equals", seed=2)
    expected = SAMPLE.composition(*args, compute=torch.float64)
    tokens = ops.sample(*(x.to(DEVICE) for x in args), backend="triton")
    assert tokens.tolist() == expected.tolist()


def test_views_that_it_cannot_read_are_refused() -> None:
    args = [x.to(DEVICE) for x in arguments(9, "plain")]
    wide = torch.zeros(len(OPTIONS), 2, device=DEVICE)
    with pytest.raises(ValueError, match="top_p must have stride 1, was 2"):
        ops.sample(*args[:3], wide[:, 0], *args[4:], backend="triton")
    with pytest.raises(ValueError, match="logits must have stride 1 in its last dimension, was 12"):
        ops.sample(args[0].T.contiguous().T, *args[1:], backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_their_fp32_values(dtype: torch.dtype) -> None:
    logits, *options = (a.to(DEVICE) for a in SAMPLE.inputs(Make(), num_seqs=12, vocab_size=700))
    for backend in ("ref", "triton"):
        narrow = ops.sample(logits.to(dtype), *options, backend=backend)
        assert torch.equal(narrow, ops.sample(logits.to(dtype).float(), *options, backend=backend))
