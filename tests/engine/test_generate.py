"""Tokens: the same as transformers', and the same however the work is cut, batched, paged and repeated."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from rooflight import LLM, SamplingParams
from rooflight.models.decoder import Linear
from tests.engine.conftest import Checkpoints
from tests.engine.late import in_every_mode
from tests.engine.support import assert_idle, prompt_ids, reference_tokens, tokens_alone, write_tokenizer
from tests.models import tiny

LENGTHS = (1, 2, 15, 16, 17, 100, 257, 500)
GREEDY = SamplingParams(max_tokens=24)


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[tuple[int, ...]]:
    tokens = [completion.token_ids for completion in llm.generate(prompts, params)]
    assert_idle(llm)
    return tokens


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> dict[int, tuple[int, ...]]:
    """transformers' greedy tokens of one prompt of each length."""
    _, model = checkpoints("qwen3", max_position_embeddings=1024)
    return {length: reference_tokens(model, prompt_ids(length, seed=length), 24) for length in (*LENGTHS, 300)}


def qwen(checkpoints: Checkpoints, **sizes: Any) -> LLM:
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    return LLM(str(folder), **({"max_model_len": 600, "max_num_batched_tokens": 64} | sizes))


PROMPTS = [prompt_ids(length, seed=length) for length in LENGTHS]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("length", [1, 33, 100])
def test_greedy_tokens_equal_transformers(checkpoints: Checkpoints, family: str, length: int) -> None:
    folder, model = checkpoints(family)
    expected = reference_tokens(model, prompt_ids(length), 48)
    assert len(set(expected)) >= 15
    assert generate(
        LLM(str(folder), max_num_batched_tokens=40), [prompt_ids(length)], SamplingParams(max_tokens=48)
    ) == [expected]


# The prompt has 40 tokens, the answer 20: a window inside the prompt, one that the answer outgrows, and wider ones.
@pytest.mark.parametrize("window", [1, 4, 39, 40, 41, 59, 60, 61, 200])
@pytest.mark.parametrize("page_size", [1, 16])
def test_br_027_sliding_window(checkpoints: Checkpoints, window: int, page_size: int) -> None:
    folder, model = checkpoints("mistral", sliding_window=window)
    # Without its cache: that keeps everything for a window of 1 (the last `-window + 1` keys are all of them).
    expected = reference_tokens(model, prompt_ids(40), 20, use_cache=False)
    llm = LLM(str(folder), page_size=page_size, max_num_batched_tokens=16)
    assert llm.config.sliding_windows == (window,) * 3
    assert generate(llm, [prompt_ids(40)], SamplingParams(max_tokens=20)) == [expected]


@pytest.mark.parametrize("window", [23, 25, None])
def test_br_027_these_tokens_tell_a_window_from_its_neighbours(checkpoints: Checkpoints, window: int | None) -> None:
    folder, _ = checkpoints("mistral")
    right = LLM(str(folder))
    other = LLM(str(folder))
    for layer in other.decoder.layers:
        layer.window = window or 0  # type: ignore[assignment]
    params = SamplingParams(max_tokens=48)
    assert right.config.sliding_windows == (24,) * 3
    assert generate(right, [prompt_ids(100)], params) != generate(other, [prompt_ids(100)], params)


@pytest.mark.parametrize("heads", [(40, 8), (24, 4), (28, 4), (14, 2), (3, 1), (64, 4), (32, 32)])
def test_br_025_any_ratio_of_heads_in_prefill_and_decode(checkpoints: Checkpoints, heads: tuple[int, int]) -> None:
    for head_dim in (64, 80, 128, 256):
        folder, model = checkpoints(
            "qwen3",
            num_hidden_layers=1,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=head_dim,
            vocab_size=300,
        )
        prompt = prompt_ids(9, vocab_size=300)
        assert generate(LLM(str(folder)), [prompt], SamplingParams(max_tokens=4)) == [
            reference_tokens(model, prompt, 4)
        ]


@pytest.mark.parametrize("chunk", [1, 7, 64, 299, 300, 1000])
def test_br_026_the_size_of_prefill_chunks_changes_nothing(
    checkpoints: Checkpoints, expected: dict[int, tuple[int, ...]], chunk: int
) -> None:
    tokens = generate(qwen(checkpoints, max_num_batched_tokens=chunk), [prompt_ids(300, seed=300)])
    assert tokens == [expected[300]]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_size_changes_nothing(
    checkpoints: Checkpoints, expected: dict[int, tuple[int, ...]], page_size: int
) -> None:
    llm = qwen(checkpoints, page_size=page_size, num_pages=2048 // page_size)
    assert generate(llm, PROMPTS) == [expected[length] for length in LENGTHS]


@in_every_mode
def test_br_013_a_batch_of_mixed_lengths_equals_solo_runs(
    checkpoints: Checkpoints, expected: dict[int, tuple[int, ...]]
) -> None:
    llm = qwen(checkpoints, num_pages=100, max_num_seqs=8)
    solo = [tokens_alone(llm, prompt, GREEDY) for prompt in PROMPTS]
    assert solo == [expected[length] for length in LENGTHS]
    for _ in range(2):
        assert generate(llm, PROMPTS) == solo
    assert generate(llm, PROMPTS[::-1]) == solo[::-1]


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("chunk", [8, 512])
def test_br_009_junk_in_unused_slots_never_shows(
    checkpoints: Checkpoints, expected: dict[int, tuple[int, ...]], junk: float, chunk: int
) -> None:
    llm = qwen(checkpoints, num_pages=100, max_num_batched_tokens=chunk)
    llm.engine.runner.cache.data.fill_(junk)
    lengths = (1, 2, 17, 100)
    prompts = [prompt_ids(length, seed=length) for length in lengths]
    assert generate(llm, prompts) == [expected[length] for length in lengths]


@in_every_mode
@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 32])
def test_br_009_a_fresh_nan_pool_at_page_borders(checkpoints: Checkpoints, length: int) -> None:
    folder, model = checkpoints("qwen3")
    llm = LLM(str(folder), max_model_len=64)
    llm.engine.runner.cache.data.fill_(torch.nan)
    tokens = generate(llm, [prompt_ids(length)], SamplingParams(max_tokens=20))
    assert tokens == [reference_tokens(model, prompt_ids(length), 20)]
    written = ~llm.engine.runner.cache.data.isnan()  # (layers, 2, pages, heads, page_size, head_dim)
    in_slots = written.all(5).all(3).all(1).all(0).flatten()
    # Keys and values of all tokens but the last one, which nothing has to look back at, and not a slot more.
    assert in_slots.tolist() == [True] * (length + len(tokens[0]) - 1) + [False] * (64 - length - len(tokens[0]) + 1)
    assert torch.equal(written, in_slots.view(-1, 1, 16, 1).expand_as(written))


@in_every_mode
@pytest.mark.parametrize("num_pages", [33, 40, 66])
def test_batches_follow_one_another_when_the_pool_is_too_small_for_all(
    checkpoints: Checkpoints, expected: dict[int, tuple[int, ...]], num_pages: int
) -> None:
    llm = qwen(checkpoints, num_pages=num_pages)  # the longest request alone needs 33
    assert generate(llm, PROMPTS) == [expected[length] for length in LENGTHS]


@in_every_mode
def test_fewer_sequences_at_a_time_change_nothing(
    checkpoints: Checkpoints, expected: dict[int, tuple[int, ...]]
) -> None:
    llm = qwen(checkpoints, num_pages=100, max_num_seqs=3)
    assert generate(llm, PROMPTS) == [expected[length] for length in LENGTHS]


@in_every_mode
def test_requests_of_one_batch_may_end_at_different_lengths(llm: LLM) -> None:
    long = tokens_alone(llm, prompt_ids(20), SamplingParams(max_tokens=30))
    counts = [5, 30, 1, 0, 12]
    results = llm.generate([prompt_ids(20)] * 5, [SamplingParams(max_tokens=count) for count in counts])
    assert [r.token_ids for r in results] == [long[:count] for count in counts]
    assert [r.finish_reason for r in results] == ["length"] * 5


SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, seed=42)


@in_every_mode
def test_br_059_a_seed_gives_the_same_tokens_whoever_shares_the_batch(llm: LLM) -> None:
    prompt = prompt_ids(20)
    alone = tokens_alone(llm, prompt, SAMPLED)
    assert alone != tokens_alone(llm, prompt, SamplingParams(max_tokens=16))
    unseeded = SamplingParams(max_tokens=16, temperature=0.8)
    seven = SamplingParams(max_tokens=16, temperature=0.8, seed=7)
    for _ in range(4):
        first = llm.generate([prompt, prompt, prompt_ids(50, seed=2)], [SAMPLED, unseeded, seven])
        last = llm.generate([prompt_ids(3), prompt, prompt], [GREEDY, seven, SAMPLED])
        assert first[0].token_ids == last[2].token_ids == tokens_alone(llm, prompt, SAMPLED) == alone
        assert last[1].token_ids != alone


@in_every_mode
def test_a_seed_gives_the_same_tokens_in_another_engine_chunk_and_page_size(checkpoints: Checkpoints) -> None:
    prompt = prompt_ids(40)
    runs = [
        generate(qwen(checkpoints, page_size=page_size, max_num_batched_tokens=chunk), [prompt], SAMPLED)
        for page_size, chunk in ((16, 64), (1, 7), (64, 1))
    ]
    assert runs[0] == runs[1] == runs[2]


def test_different_seeds_and_no_seeds_differ(llm: LLM) -> None:
    prompt = prompt_ids(20)
    hot = [SamplingParams(max_tokens=16, temperature=2.0, seed=seed) for seed in (1, 2, -1)]
    unseeded = SamplingParams(max_tokens=16, temperature=2.0)
    results = llm.generate([prompt] * 5, [*hot, unseeded, unseeded])
    assert len({result.token_ids for result in results}) == 5


def test_the_same_tokens_in_both_halves_of_a_doubled_batch(llm: LLM) -> None:
    results = llm.generate([prompt_ids(20)] * 2, SAMPLED)
    assert results[0].token_ids == results[1].token_ids


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 0, "top_k": 3}, {"temperature": 0, "top_p": 0.5}, {"temperature": 0, "min_p": 0.5, "seed": 3},
     {"temperature": 0.9, "top_k": 1}, {"temperature": 0.9, "top_p": 0}, {"temperature": 0.9, "min_p": 1},
     {"temperature": 1e-30}],
    ids=str,
)  # fmt: skip
def test_ways_to_be_greedy(llm: LLM, filters: dict[str, Any]) -> None:
    greedy = tokens_alone(llm, prompt_ids(20), SamplingParams(max_tokens=16))
    assert tokens_alone(llm, prompt_ids(20), SamplingParams(max_tokens=16, **filters)) == greedy


@in_every_mode
def test_br_055_every_filter_in_one_batch_beside_greedy_rows(checkpoints: Checkpoints) -> None:
    """top_k, top_p and min_p at and beyond their ends, an odd vocabulary, greedy and sampled rows together."""
    vocab_size = 40_001
    folder, _ = checkpoints("llama", vocab_size=vocab_size, tie_word_embeddings=True)
    llm = LLM(str(folder), max_num_seqs=64, num_pages=64)
    prompt = prompt_ids(12, vocab_size=vocab_size)
    greedy = tokens_alone(llm, prompt, SamplingParams(max_tokens=3))
    free = tokens_alone(llm, prompt, SamplingParams(max_tokens=3, temperature=1.5, seed=9))
    assert free != greedy
    filters = [*itertools.product([2**70, 9_999_999, vocab_size, 1, 0, -1], [0, 1e-9, 1], [0, 1])]
    params = [
        SamplingParams(max_tokens=3, temperature=heat, top_k=k, top_p=p, min_p=floor, seed=9)
        for heat, (k, p, floor) in itertools.chain(((1.5, f) for f in filters), ((0, f) for f in filters[::3]))
    ]
    for option, completion in zip(params, llm.generate([prompt] * len(params), params), strict=True):
        off = option.temperature > 0 and option.top_k != 1 and option.top_p == 1 and option.min_p == 0
        assert completion.token_ids == (free if off else greedy), option
        assert completion.finish_reason == "length"


def test_completions_say_what_was_asked_and_how_long_it_took(llm: LLM) -> None:
    prompts = [prompt_ids(70), prompt_ids(5)]
    for prompt, completion in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=8)), strict=True):
        assert completion.prompt_token_ids == tuple(prompt)
        assert (len(completion.token_ids), completion.finish_reason, completion.error) == (8, "length", None)
        assert 0 < completion.timing.first_token < completion.timing.total
        rest = completion.timing.total - completion.timing.first_token
        assert completion.timing.seconds_per_token(8) == pytest.approx(rest / 7)
        assert completion.timing.seconds_per_token(1) == 0
        assert completion.text == llm.tokenizer.decode(completion.token_ids)  # type: ignore[union-attr]


@pytest.mark.parametrize("keys", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {}], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_br_046_weights_and_cache_have_the_dtype_of_the_file(tmp_path: Any, keys: dict[str, str], nested: bool) -> None:
    model = tiny.reference_model("llama").to(torch.bfloat16)
    tiny.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | keys
    if nested:
        config = {"architectures": config.pop("architectures"), "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=64)
    linears = [module.weight for module in llm.decoder.modules() if isinstance(module, Linear)]
    weights = {id(weight): weight for weight in (*llm.decoder.parameters(), *linears)}.values()  # some are packed
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    packed_head = llm.decoder.head.weight.numel() if llm.config.tie_word_embeddings else 0  # beside the embedding
    assert sum(weight.numel() for weight in weights) == llm.config.num_parameters() + packed_head
    assert (llm.config.dtype, llm.engine.runner.cache.data.dtype) == (torch.bfloat16, torch.bfloat16)
    assert llm.engine.runner.cache.bytes == 64 * llm.config.kv_bytes_per_token()
    assert llm.decoder.cos_sin.dtype == torch.float32
    wide = LLM(str(tmp_path), dtype="fp32", max_model_len=64)
    expected = reference_tokens(model.float(), prompt_ids(20), 8)
    assert tokens_alone(wide, prompt_ids(20), SamplingParams(max_tokens=8)) == expected


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_br_046_a_named_dtype_wins_and_answers(dtype: str, torch_dtype: torch.dtype) -> None:
    llm = LLM("random:tiny", dtype=dtype, max_model_len=128)
    assert llm.decoder.embed.dtype == llm.engine.runner.cache.data.dtype == torch_dtype
    results = llm.generate([prompt_ids(50), prompt_ids(3)], SamplingParams(max_tokens=8))
    assert [(len(r.token_ids), r.finish_reason) for r in results] == [(8, "length")] * 2
    assert all(0 <= token < 1000 for r in results for token in r.token_ids)
    assert generate(llm, [prompt_ids(50)], SamplingParams(max_tokens=8)) == [results[0].token_ids]


def test_random_weights_answer_in_ids_without_a_tokenizer() -> None:
    llm = LLM("random:tiny", max_model_len=64)
    assert llm.tokenizer is None
    results = [LLM("random:tiny", max_model_len=64).generate([1, 2, 3], GREEDY)[0] for _ in range(2)]
    assert results[0].token_ids == results[1].token_ids
    assert (len(results[0].token_ids), results[0].text, results[0].prompt_token_ids) == (24, "", (1, 2, 3))
    chunks = list(llm.stream([1, 2, 3], GREEDY))
    assert [chunk.token_ids for chunk in chunks] == [(token,) for token in results[0].token_ids]
    assert {chunk.text for chunk in chunks} == {""}
