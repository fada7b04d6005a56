"""The small real model, from its GGUF file to text: the answer everybody else gives, word for word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM, Completion, SamplingParams
from rooflight.engine.llm import Prompt
from rooflight.models.checkpoint.base import CheckpointError
from rooflight.models.sources import embedded_default
from tests.engine.support import Script, assert_idle

QUESTION = "Why is the sky blue? Answer in two sentences."
# FP32 transformers and llama.cpp agree on these 64 tokens.
ANSWER = (
    "The sky blue is a result of the Earth's atmosphere scattering sunlight in different wavelengths. When sunlight "
    "reaches our planet, it has all the colors of the rainbow, but only one of them is visible: blue. This is because "
    "the Earth's atmosphere is composed of a mix of gases, including water vapor, ozone, and"
)
GREEDY = SamplingParams(max_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The same sums in the same order on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    try:
        return embedded_default()
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def llm(gguf_file: Path) -> LLM:
    return LLM(dtype="fp32", max_model_len=512)  # no name: the embedded default


@pytest.fixture(scope="module")
def streamed(llm: LLM) -> tuple[list[str], Completion]:
    """Texts of the chunks and the completion of the question."""
    chunks = list(llm.stream([{"role": "user", "content": QUESTION}], GREEDY))
    completion = chunks[-1].completion
    assert completion is not None
    return [chunk.text for chunk in chunks], completion


@pytest.mark.slow
def test_the_answer_is_the_known_one_word_for_word(llm: LLM, streamed: tuple[list[str], Completion]) -> None:
    texts, completion = streamed
    assert (len(completion.prompt_token_ids), len(completion.token_ids)) == (41, 64)
    assert completion.text == ANSWER
    assert "".join(texts) == ANSWER
    assert completion.finish_reason == "length"
    assert len([text for text in texts if text]) > 60  # word by word
    assert_idle(llm)


@pytest.mark.slow
def test_chat_beside_other_requests_gives_the_same_answer(llm: LLM, streamed: tuple[list[str], Completion]) -> None:
    _, completion = streamed
    prompts: list[Prompt] = ["The sea", list(completion.prompt_token_ids), "def add(x, y):\n"]
    results = llm.generate(prompts, SamplingParams(max_tokens=24))
    assert results[1].token_ids == completion.token_ids[:24]
    assert llm.chat(QUESTION, SamplingParams(max_tokens=8)).token_ids == completion.token_ids[:8]


@pytest.mark.slow
def test_the_answer_equals_transformers_from_the_same_file(
    gguf_file: Path, streamed: tuple[list[str], Completion]
) -> None:
    transformers = pytest.importorskip("transformers")
    _, completion = streamed
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    ids = torch.tensor([completion.prompt_token_ids])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    assert tuple(out[0, 41:].tolist()) == completion.token_ids


@pytest.mark.slow
def test_an_answer_ends_at_its_end_token(llm: LLM) -> None:
    completion = llm.chat("Say yes.", SamplingParams(max_tokens=200))
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in llm.engine.end_ids
    assert not any(token in llm.engine.end_ids for token in completion.token_ids[:-1])
    assert "<|im_end|>" not in completion.text
    assert completion.text.strip()


@pytest.mark.slow
def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def answer(seed: int) -> str:
        params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": seed}
        return llm.chat("Tell me a story.", SamplingParams(max_tokens=6, **params)).text

    first = [answer(seed) for seed in (1, 2, 3)]
    assert len(set(first)) == 3
    assert answer(2) == first[1]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["🦙 says hi 👨‍👩‍👧‍👦!", "안녕하세요 세계 😀", "你好，世界。🇰🇷"])
def test_br_047_emoji_stream_in_whole_characters(monkeypatch: pytest.MonkeyPatch, llm: LLM, text: str) -> None:
    """The answer is scripted, so that it surely has them; the vocabulary is the real one, which cuts them in pieces."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text, add_special=False)
    assert len(ids) > len(text) / 2
    monkeypatch.setattr(llm.engine.runner, "run", Script(llm, [*ids, llm.tokenizer.eos_ids[0]]))
    chunks = list(llm.stream("Hi", SamplingParams(max_tokens=100)))
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert any(chunk.text == "" and chunk.finish_reason is None for chunk in chunks)  # a character was in pieces
    assert chunks[-1].finish_reason == "stop"
