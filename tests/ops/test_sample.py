"""sample: known answers of Philox, exact distributions, the order of the filters, and rows that have none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from rooflight import ops
from rooflight.ops.sample import SAMPLE, uniform
from tests.contract.harness import Target, implementations

samplers = implementations("sample")


def draws(target: Target, full: int = 4000) -> int:
    """In Triton's interpreter a row takes some 50 ms, so there are fewer; the draws are those of the reference."""
    return 40 if target.provider == "triton" and target.device == "cpu" else full


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> list[int]:
    """Philox4x32 in Python integers, written from the paper; the tests below check it against Random123's vectors."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


VECTORS = [  # counter, key, result: the known-answer tests of Random123
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(counter, key) == expected


def as_uniform(words: Sequence[int]) -> float:
    """53 random bits: 27 of the first word, 26 of the second."""
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_uniform_is_philox_with_seed_as_key_and_position_as_counter(device: str) -> None:
    """Whole 64-bit range of both, negative seeds included; the first is the first known answer above."""
    numbers = [0, 1, 2, 41, (1 << 32) - 1, 1 << 32, (1 << 33) + 5, (1 << 63) - 1, -1, -(1 << 63), -7919]
    pairs = [(seed, position) for seed in numbers for position in numbers]
    seeds, positions = (torch.tensor(column, device=device) for column in zip(*pairs, strict=True))
    draws = uniform(seeds, positions).tolist()
    assert draws[0] == as_uniform(VECTORS[0][2])
    for (seed, position), draw in zip(pairs, draws, strict=True):
        counter, key = position % (1 << 64), seed % (1 << 64)
        words = philox4x32([counter % (1 << 32), counter >> 32, 0, 0], [key % (1 << 32), key >> 32])
        assert draw == as_uniform(words)
        assert 0.0 <= draw < 1.0
    assert len(set(draws)) == len(draws)


def sample(
    target: Target,
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1234,
    first: int = 0,
) -> torch.Tensor:
    """One draw for each row, at positions from `first` on."""
    rows, device = logits.shape[0], target.device
    columns = [
        torch.full((rows,), value, dtype=dtype, device=device)
        for value, dtype in (
            (temperature, torch.float32),
            (top_k, torch.int32),
            (top_p, torch.float32),
            (min_p, torch.float32),
            (seed, torch.int64),
        )
    ]
    positions = torch.arange(first, first + rows, device=device)
    return ops.sample(logits.float().to(device), *columns, positions, backend=target.provider).cpu()


def draw_many(target: Target, row: torch.Tensor, **options: float) -> torch.Tensor:
    return sample(target, row.expand(draws(target), -1), **options)  # type: ignore[arg-type]


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum().item() == 0, "a token that the filters dropped was drawn"
    expected = probabilities[probabilities > 0] * len(tokens)
    return ((counts[probabilities > 0] - expected) ** 2 / expected).sum().item()


ROW = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.0, 1.9, -2.5, 1.5])
# One-in-100,000 values of the chi-square distribution by degrees of freedom; seeds are fixed, so no test flickers.
CRITICAL = {1: 19.5, 2: 23.0, 3: 25.9, 4: 28.5, 5: 30.9, 6: 33.1, 7: 35.3}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 0.6}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_k": 3}, [2, 5, 7]),
        ({"top_p": 0.75}, [2, 5, 7]),
        ({"min_p": 0.4}, [2, 3, 5, 7]),
        ({"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.6}, [2, 5, 7]),
    ],
    ids=str,
)
@samplers
def test_draws_follow_the_exact_distribution(target: Target, options: dict[str, float], kept: list[int]) -> None:
    """Chi-square of the draws against softmax(logits / temperature) over the tokens that the filters keep."""
    weights = torch.exp(ROW.double() / options.get("temperature", 1.0))
    probabilities = torch.zeros_like(weights)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    for seed in (1, 99):
        tokens = draw_many(target, ROW, seed=seed, **options)
        assert chi_square(tokens, probabilities) < CRITICAL[len(kept) - 1]


def support(target: Target, probabilities: Sequence[float], **options: float) -> set[int]:
    row = torch.tensor(probabilities).log()
    return set(sample(target, row.expand(draws(target, 300), -1), **options).tolist())  # type: ignore[arg-type]


@samplers
def test_filters_come_in_the_documented_order(target: Target) -> None:
    """Temperature, top-k, top-p, min-p: in each line another order would keep other tokens."""
    row = [0.4, 0.3, 0.2, 0.1]
    assert support(target, row, top_p=0.5) == {0, 1}
    assert support(target, row, top_p=0.5, temperature=0.5) == {0}  # squared: 0.53 0.30 0.13 0.03
    assert support(target, row, top_p=0.5, temperature=2.0) == {0, 1}  # square roots: 0.32 0.28 0.23 0.16
    assert support(target, row, top_p=0.55, top_k=2) == {0}  # 0.57 0.43 after top-k, 0.4 0.3 before
    assert support(target, row, top_p=0.75, min_p=0.45) == {0, 1, 2}  # min-p first would leave 0.44 0.33 0.22
    assert support(target, row, min_p=0.45, temperature=0.5) == {0, 1}  # 0.2 is a quarter of 0.4 when squared
    assert support(target, row, top_k=3, min_p=0.6) == {0, 1}


@samplers
def test_top_p_keeps_the_token_that_reaches_it(target: Target) -> None:
    """Exact binary fractions: 0.5 is reached by one token, anything more needs the next."""
    row = [0.5, 0.25, 0.125, 0.125]
    assert support(target, row, top_p=0.5) == {0}
    assert support(target, row, top_p=0.5001) == {0, 1}
    assert support(target, row, top_p=0.75) == {0, 1}
    assert support(target, row, top_p=0.9999) == {0, 1, 2, 3}
    assert support(target, row[::-1], top_p=0.75) == {2, 3}


@samplers
def test_ties_are_broken_by_token_id(target: Target) -> None:
    """Of equal logits the lower id is the better one: greedy, top-k and top-p."""
    equal = torch.zeros(1, 4)
    assert sample(target, equal, temperature=0.0).tolist() == [0]
    assert support(target, [0.25] * 4, top_k=2) == {0, 1}
    assert support(target, [0.25] * 4, top_p=0.5) == {0, 1}
    assert support(target, [0.1, 0.3, 0.3, 0.3], top_k=1) == {1}
    assert support(target, [0.1, 0.3, 0.3, 0.3], top_k=2) == {1, 2}
    assert support(target, [0.25] * 4, min_p=1.0) == {0, 1, 2, 3}  # all are as good as the best


@samplers
def test_greedy_is_the_first_of_the_largest(target: Target) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, -1.0], [-3.0, -2.0, -2.0, -9.0]])
    for temperature in (0.0, -1.0):
        assert sample(target, logits, temperature=temperature).tolist() == [1, 1]


@samplers
def test_a_draw_depends_on_nothing_but_its_row(target: Target) -> None:
    """Alone, in a batch, in another order, beside rows with other options: the same token."""
    generator = torch.Generator().manual_seed(0)
    rows, device = 12, target.device
    logits = torch.randn(rows, 300, generator=generator) * 2
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3] * 3)
    top_k = torch.tensor([0, 5, 0, 50, 1, 0] * 2, dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 0.5] * 4)
    min_p = torch.tensor([0.0, 0.05] * 6)
    seed, position = torch.arange(rows) * 31 - 7, torch.arange(rows) + 1000
    args = [x.to(device) for x in (logits, temperature, top_k, top_p, min_p, seed, position)]
    batch = ops.sample(*args, backend=target.provider)
    alone = torch.cat([ops.sample(*(x[i : i + 1] for x in args), backend=target.provider) for i in range(rows)])
    assert torch.equal(batch, alone)
    order = torch.randperm(rows, generator=generator).to(device)
    assert torch.equal(ops.sample(*(x[order] for x in args), backend=target.provider), batch[order])
    args[0][3:] = float("nan")  # broken neighbours
    assert torch.equal(ops.sample(*args, backend=target.provider)[:3], batch[:3])


@samplers
def test_seed_and_position_both_choose_the_draw(target: Target) -> None:
    flat = torch.zeros(16, 1000)
    first = sample(target, flat, seed=42)
    assert torch.equal(first, sample(target, flat, seed=42))
    assert torch.equal(first[1:], sample(target, flat, seed=42, first=1)[:-1])  # position, not row
    assert not torch.equal(first, sample(target, flat, seed=43))
    assert len(set(first.tolist())) > 10


@samplers
def test_br_054_rows_without_a_distribution(target: Target) -> None:
    """Row 2 all NaN, one NaN, all -inf, +inf: a defined result, and rows 0, 1 and 3 as without it."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    one_nan, one_inf = logits[2].clone(), logits[2].clone()
    one_nan[777] = float("nan")
    one_inf[[9, 500]] = float("inf")
    broken = {
        "all NaN": (torch.full((1000,), float("nan")), -1),
        "one NaN": (one_nan, -1),
        "all -inf": (torch.full((1000,), float("-inf")), -1),
        "+inf": (one_inf, 9),
    }
    assert ops.NO_TOKEN == -1
    for options in ({"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {}):
        clean = sample(target, logits, **options)
        for row, expected in broken.values():
            logits_with = logits.clone()
            logits_with[2] = row
            tokens = sample(target, logits_with, **options)
            assert tokens[[0, 1, 3]].tolist() == clean[[0, 1, 3]].tolist()
            assert tokens[2].item() == expected


@samplers
def test_br_054_tokens_at_minus_infinity_are_never_drawn(target: Target) -> None:
    row = torch.full((50,), float("-inf"))
    row[[3, 17]] = 0.0
    for options in ({}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 0.01}, {"temperature": 100.0}):
        assert set(draw_many(target, row, **options).tolist()) == {3, 17}


@samplers
def test_br_055_options_at_and_beyond_their_ends(target: Target) -> None:
    """Vocabulary 40001, greedy and sampled rows in one batch: top_k off at 9999999, 0 and -1; top_p 0 is greedy."""
    vocab, device = 40001, target.device
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 3
    best = logits.argmax().item()
    off = sample(target, logits).item()
    assert off != best
    for top_k in (9999999, 0, -1, vocab, vocab + 1):
        assert sample(target, logits, top_k=top_k).item() == off
    assert sample(target, logits, top_k=1).item() == best
    for top_p in (0.0, 1e-9, -1.0):
        assert sample(target, logits, top_p=top_p).item() == best
    for top_p in (1.0, 2.0):
        assert sample(target, logits, top_p=top_p).item() == off
    for min_p in (1.0, 2.0):
        assert sample(target, logits, min_p=min_p).item() == best
    for min_p in (0.0, -1.0):
        assert sample(target, logits, min_p=min_p).item() == off
    mixed = {  # temperature, top_k, top_p, min_p -> token
        (0.0, 9999999, 0.0, 1.0): best,
        (1.0, 9999999, 1.0, 0.0): off,
        (1.0, 1, 1.0, 0.0): best,
        (0.0, 0, 1.0, 0.0): best,
        (1.0, -1, 1.0, 0.0): off,
    }
    heat, k, p, floor = zip(*mixed, strict=True)
    rows = len(mixed)
    tokens = ops.sample(
        logits.expand(rows, -1).to(device),
        torch.tensor(heat, device=device),
        torch.tensor(k, dtype=torch.int32, device=device),
        torch.tensor(p, device=device),
        torch.tensor(floor, device=device),
        torch.full((rows,), 1234, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        backend=target.provider,
    )
    assert tokens.tolist() == list(mixed.values())


@samplers
def test_extreme_temperatures(target: Target) -> None:
    """Very cold is greedy without overflow; very hot is uniform."""
    row = torch.tensor([1.0, 1.5, -2.0, 0.0])
    assert set(draw_many(target, row, temperature=1e-6).tolist()) == {1}
    assert set(draw_many(target, row * 1e30, temperature=1e-6).tolist()) == {1}
    assert chi_square(draw_many(target, row, temperature=1e6), torch.full((4,), 0.25).double()) < CRITICAL[3]


def test_expected_sizes_of_the_chi_square_critical_values() -> None:
    """The table above against the exact tail for two degrees of freedom, exp(-x / 2)."""
    assert math.exp(-CRITICAL[2] / 2) == pytest.approx(1e-5, rel=0.05)


@samplers
def test_equals_far_apart_are_counted_in_token_id_order(target: Target) -> None:
    """Equal logits, zeros of both signs among them, at the two ends of a wide row and beside better ones between."""
    row = torch.full((1, 2503), -1.0)
    row[0, [7, 2100, 2501]] = torch.tensor([0.0, -0.0, 0.0])
    row[0, [1200, 2502]] = 3.0
    assert sample(target, row, temperature=0.0).item() == 1200
    for top_k, kept in ((1, {1200}), (2, {1200, 2502}), (3, {7, 1200, 2502}), (4, {7, 1200, 2100, 2502})):
        # Hot enough that all kept are about as likely.
        drawn = sample(target, row.expand(draws(target, 40) // 2, -1), temperature=1000.0, top_k=top_k)
        assert set(drawn.tolist()) == kept
    equal = sample(target, torch.zeros(10, 2503), top_p=0.5)  # half of 2503 equals: the first 1252
    assert equal.max().item() <= 1251
    assert equal.max().item() > 1000


@samplers
def test_tokens_are_those_of_a_walk_in_python_floats(target: Target) -> None:
    """Wide rows with every filter, flat and steep, equals among them."""
    generator = torch.Generator().manual_seed(5)
    options = [
        (1.0, 0, 1.0, 0.0), (0.7, 20, 0.95, 0.0), (1.0, 0, 0.9, 0.0), (3.0, 0, 0.6, 0.0), (1.0, 1250, 1.0, 0.0),
        (1.0, 1500, 0.8, 0.0), (1.3, 0, 1.0, 0.02), (0.0, 5, 0.5, 0.5), (0.3, 4, 0.999, 0.1),
    ]  # fmt: skip
    logits = torch.randn(len(options), 2503, generator=generator) * 3
    logits[::2] = (logits[::2] * 4).round() / 4  # many equals
    logits[3] /= 30
    logits[5, 100:2000] = float("-inf")
    columns = zip(*options, strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    parameters = [torch.tensor(c, dtype=d) for c, d in zip(columns, dtypes, strict=True)]
    for seed in range(2):
        seeds, positions = torch.arange(len(options)) + 100 * seed, torch.arange(len(options))
        args = (logits, *parameters, seeds, positions)
        expected = SAMPLE.composition(*args, compute=torch.float64)
        tokens = ops.sample(*(x.to(target.device) for x in args), backend=target.provider)
        assert tokens.tolist() == expected.tolist()
