"""The front door: what goes in, what is refused, and streams that are closed, dropped, mixed and interrupted."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rooflight
from rooflight import LLM, Chunk, SamplingParams
from rooflight.engine.llm import Prompt
from rooflight.engine.plan import StepPlan
from tests.engine.late import in_every_mode
from tests.engine.support import (
    SPECIALS,
    Script,
    assert_idle,
    byte_level_backend,
    ids_of,
    prompt_ids,
    tokens_alone,
    write_tokenizer,
)
from tests.models import tiny

PARAMS = SamplingParams(max_tokens=12)


def tokens_of(chunks: Iterator[Chunk] | list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def test_the_package_has_the_front_door() -> None:
    assert rooflight.LLM is LLM
    assert {"LLM", "SamplingParams", "Completion", "Chunk", "Timing"} <= set(rooflight.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = rooflight.LLMs


# What may be a prompt ---------------------------------------------------------------------------------------------


def test_one_prompt_or_many_texts_or_ids(llm: LLM) -> None:
    ids = ids_of("hey")
    one = tokens_alone(llm, ids, PARAMS)
    for prompts in (
        "hey",
        ids,
        tuple(ids),
        np.array(ids),
        ["hey"],
        [ids],
        ("hey",),
        [np.array(ids)],
        [torch.tensor(ids)],
    ):
        (completion,) = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
        assert (completion.token_ids, completion.prompt_token_ids) == (one, tuple(ids))
    text_first: list[Prompt] = ["hey", ids]
    for results in (llm.generate(text_first, PARAMS), llm.generate(text_first[::-1], PARAMS)):
        assert [completion.token_ids for completion in results] == [one, one]
    assert tokens_of(llm.stream("hey", PARAMS)) == tokens_of(llm.stream(ids, PARAMS)) == one


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([], PARAMS) == []
    assert llm.generate([], []) == []


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[number, 5] for number in range(30)]
    counts = [1 + (7 * number) % 11 for number in range(30)]
    results = llm.generate(prompts, [SamplingParams(max_tokens=count) for count in counts])
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert [len(r.token_ids) for r in results] == counts


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt must have at least one token"),
    ([""], "prompt must have at least one token"),
    ([[]], "prompt must have at least one token"),
    ([[1], []], "prompt must have at least one token"),
    (["ok", ""], "prompt must have at least one token"),
    ([[1000]], "prompt must have token ids below 1000"),
    ([[5, -1]], "prompt must have token ids below 1000"),
    ([[1] * 600], "was 600 tokens"),
    (["x" * 601], "was 601 tokens"),
    ([[1.0, 2.0]], "prompt must be a text or a list of token ids"),
    ([["a", "b"]], "prompt must be a text or a list of token ids"),
    ([[1, "7"]], "prompt must be a text or a list of token ids"),
    ([[None]], "prompt must be a text or a list of token ids"),
    ([None], "prompt must be a text or a list of token ids"),
    ([1, "a"], "prompt must be a text or a list of token ids"),
    (["a", 1], "prompt must be a text or a list of token ids"),
    ([{"role": "user", "content": "hi"}], "prompt must be a text or a list of token ids"),
    (torch.tensor([1, 2, 3]), "prompt must be a text or a list of token ids"),
    (5 * torch.ones(2, 3, 4), "prompt must be a text or a list of token ids"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=[str(i) for i in range(len(BAD_PROMPTS))])
def test_bad_prompts_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, prompts: Any, message: str
) -> None:
    script = Script(llm, [1])
    monkeypatch.setattr(llm.engine.runner, "run", script)
    with pytest.raises(ValueError, match=message) as caught:
        llm.generate(prompts, PARAMS)
    assert script.steps == 0
    assert_idle(llm)
    assert caught.tb is not None  # its frames are alive until here: nothing was freed by chance


def test_a_stream_refuses_at_the_call_and_not_at_the_first_chunk(llm: LLM) -> None:
    bad: list[Any] = ["", [], [1000], [-1], [1] * 600, "x" * 600, [1.5], ["a"], ["7"], [None], [[1, 2]]]
    for prompt in bad:
        with pytest.raises(ValueError, match="prompt must"):
            llm.stream(prompt, PARAMS)
        assert_idle(llm)


@pytest.mark.parametrize(("length", "answer"), [(598, 2), (599, 1), (600, None), (601, None)])
def test_prompts_around_the_length_of_the_context(llm: LLM, length: int, answer: int | None) -> None:
    prompt = prompt_ids(length)
    if answer is None:
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=f"in the context of 600 tokens, was {length} tokens"):
                call(prompt, PARAMS)
    else:
        (completion,) = llm.generate(prompt, SamplingParams(max_tokens=50, ignore_eos=True))
        assert (len(completion.token_ids), completion.finish_reason) == (answer, "length")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_params_as_prompts(monkeypatch: pytest.MonkeyPatch, llm: LLM, count: int) -> None:
    script = Script(llm, [1])
    monkeypatch.setattr(llm.engine.runner, "run", script)
    with pytest.raises(ValueError, match=f"params must be one or as many as prompts = 2, was {count}"):
        llm.generate([[1], [2]], [PARAMS] * count)
    assert script.steps == 0


def test_without_params_the_defaults_count(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm.engine.runner, "run", Script(llm, ids_of("m")))
    (completion,) = llm.generate([1])
    assert (len(completion.token_ids), completion.finish_reason) == (SamplingParams().max_tokens, "length")
    assert len(tokens_of(llm.stream([1]))) == SamplingParams().max_tokens


def test_a_bad_request_never_reaches_its_neighbours(llm: LLM) -> None:
    alone = tokens_alone(llm, [1, 2, 3], PARAMS)
    open_stream = llm.stream([1, 2, 3], PARAMS)
    head = [next(open_stream) for _ in range(3)]
    mistakes: list[list[Prompt]] = [[[4], [1000]], [[4], "x" * 700]]
    for bad in mistakes:
        with pytest.raises(ValueError, match="prompt must"):
            llm.generate(bad, PARAMS)
    assert tokens_of(head) + tokens_of(open_stream) == alone
    assert tokens_alone(llm, [1, 2, 3], PARAMS) == alone


def test_text_for_a_model_without_a_tokenizer_is_refused() -> None:
    llm = LLM("random:tiny", max_model_len=64)
    message = "prompt must be token ids: this model has no tokenizer, was text"
    mixed: list[Prompt] = [[1], "hi"]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("hi"),
        lambda: llm.generate(mixed),
        lambda: llm.stream("hi"),
        lambda: llm.chat("hi"),
        lambda: llm.stream([{"role": "user", "content": "hi"}]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="stop must be empty for a model without a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))
    assert_idle(llm)
    assert len(tokens_alone(llm, [1], PARAMS)) == 12


# Streams ----------------------------------------------------------------------------------------------------------


@in_every_mode
@pytest.mark.parametrize("taken", [0, 1, 5, 12])
def test_closing_a_stream_early_frees_its_pages(llm: LLM, taken: int) -> None:
    chunks = llm.stream(prompt_ids(70), PARAMS)
    for _ in range(taken):
        next(chunks)
    if taken < 12:
        assert llm.engine.busy
    chunks.close()
    assert_idle(llm)
    assert list(chunks) == []
    assert len(tokens_alone(llm, prompt_ids(70), PARAMS)) == 12


@in_every_mode
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_dropping_a_stream_frees_its_pages(llm: LLM, taken: int) -> None:
    chunks = llm.stream(prompt_ids(70), PARAMS)
    for _ in range(taken):
        next(chunks)
    del chunks
    gc.collect()
    assert_idle(llm)


def test_br_070_streams_that_are_left_two_hundred_times_leave_nothing(llm: LLM) -> None:
    for number in range(200):
        chunks = llm.stream(prompt_ids(10, seed=number), SamplingParams(max_tokens=500))
        for _ in range(number % 3):
            next(chunks)
        del chunks
    gc.collect()
    assert_idle(llm)


@in_every_mode
def test_a_consumer_that_raises_frees_the_pages(llm: LLM) -> None:
    def consume() -> None:
        for number, _ in enumerate(llm.stream(prompt_ids(70), PARAMS)):
            if number == 3:
                raise KeyError("consumer")

    with pytest.raises(KeyError, match="consumer"):
        consume()
    gc.collect()
    assert_idle(llm)


@in_every_mode
def test_a_runner_that_raises_ends_the_call_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    alone = tokens_alone(llm, [1, 2, 3], PARAMS)
    run, calls = llm.engine.runner.run, 0

    def failing(plan: StepPlan) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        return run(plan)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", failing)
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            llm.generate([[1, 2, 3], [4]], PARAMS)
        assert_idle(llm)
        assert caught.tb is not None
        calls = 0
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            list(llm.stream([1, 2, 3], PARAMS))
        assert_idle(llm)
        assert caught.tb is not None
    assert tokens_alone(llm, [1, 2, 3], PARAMS) == alone


@pytest.fixture
def alone(llm: LLM) -> dict[int, tuple[int, ...]]:
    """Tokens of a few prompts on their own, by length."""
    return {length: tokens_alone(llm, prompt_ids(length), PARAMS) for length in (3, 17, 70)}


@in_every_mode
def test_two_streams_read_in_turns(llm: LLM, alone: dict[int, tuple[int, ...]]) -> None:
    first, second = llm.stream(prompt_ids(3), PARAMS), llm.stream(prompt_ids(70), PARAMS)
    pairs = list(zip(first, second, strict=True))
    assert tokens_of([pair[0] for pair in pairs]) == alone[3]
    assert tokens_of([pair[1] for pair in pairs]) == alone[70]
    assert pairs[-1][0].completion is not None
    assert pairs[-1][1].completion is not None
    assert (pairs[-1][0].completion.token_ids, pairs[-1][1].completion.token_ids) == (alone[3], alone[70])


@in_every_mode
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_streams_read_one_after_the_other(llm: LLM, alone: dict[int, tuple[int, ...]], order: tuple[int, ...]) -> None:
    """Whoever is read drives the others along; their chunks wait for them."""
    streams = [llm.stream(prompt_ids(length), PARAMS) for length in alone]
    heads = [next(streams[index]) for index in order]
    tokens = {index: tokens_of([head]) for index, head in zip(order, heads, strict=True)}
    for index in order:
        tokens[index] += tokens_of(streams[index])
    assert [tokens[index] for index in range(3)] == list(alone.values())


@in_every_mode
def test_a_stream_ends_between_two_chunks_of_another(llm: LLM, alone: dict[int, tuple[int, ...]]) -> None:
    long, short = llm.stream(prompt_ids(3), PARAMS), llm.stream(prompt_ids(17), SamplingParams(max_tokens=1))
    head = [next(long)]
    assert tokens_of(short) == alone[17][:1]
    assert tokens_of(head) + tokens_of(long) == alone[3]


@in_every_mode
def test_generate_while_a_stream_is_open(llm: LLM, alone: dict[int, tuple[int, ...]]) -> None:
    chunks = llm.stream(prompt_ids(70), PARAMS)
    head = [next(chunks), next(chunks)]
    assert tokens_alone(llm, prompt_ids(3), PARAMS) == alone[3]
    assert tokens_alone(llm, prompt_ids(17), PARAMS) == alone[17]
    assert tokens_of(head) + tokens_of(chunks) == alone[70]


def test_closing_one_stream_leaves_the_other(llm: LLM, alone: dict[int, tuple[int, ...]]) -> None:
    first, second = llm.stream(prompt_ids(3), PARAMS), llm.stream(prompt_ids(70), PARAMS)
    head = [next(second)]
    next(first)
    first.close()
    assert tokens_of(head) + tokens_of(second) == alone[70]


def test_a_stream_whose_request_was_aborted_raises_and_does_not_wait_for_ever(llm: LLM) -> None:
    chunks = llm.stream(prompt_ids(3), PARAMS)
    next(chunks)
    (request_id,) = llm.engine._requests
    llm.engine.abort(request_id)
    with pytest.raises(RuntimeError, match=f"request {request_id} was aborted by someone else than its reader"):
        next(chunks)


@in_every_mode
def test_streams_that_do_not_fit_together_are_served_in_order(alone: dict[int, tuple[int, ...]], llm: LLM) -> None:
    small = LLM(str(_folder(llm)), page_size=4, num_pages=24, max_model_len=90)
    streams = [small.stream(prompt_ids(length), PARAMS) for length in (70, 3, 17)]
    assert tokens_of(streams[2]) == alone[17]
    assert tokens_of(streams[0]) == alone[70]
    assert tokens_of(streams[1]) == alone[3]
    assert_idle(small)


def _folder(llm: LLM) -> Path:
    assert llm.tokenizer is not None
    return Path(llm.tokenizer._vocabulary.source)


# Chat -------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<a>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<b>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<d>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hey"}]
RENDERED = ids_of("<s>", "<a>", "user:hey", "<b>")


@pytest.fixture(scope="module")
def chat_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tokenizer that begins every text with BOS, and a template that writes one as well."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.save(tiny.reference_model("llama"), folder)
    write_tokenizer(folder, bos_token="<s>", add_bos_token=True, eos_token="<c>", chat_template=TEMPLATE)
    return LLM(str(folder))


def test_chat_takes_messages_or_one_text(chat_llm: LLM) -> None:
    by_text, by_messages = chat_llm.chat("hey", PARAMS), chat_llm.chat(MESSAGES, PARAMS)
    assert by_text.prompt_token_ids == by_messages.prompt_token_ids == tuple(RENDERED)
    assert by_text.token_ids == by_messages.token_ids == tokens_of(chat_llm.stream(MESSAGES, PARAMS))
    assert by_text.token_ids == tokens_alone(chat_llm, RENDERED, PARAMS)


def test_br_051_one_bos_in_a_chat_and_in_a_text(chat_llm: LLM) -> None:
    bos = SPECIALS.index("<s>")
    prompts = [
        chat_llm.chat(MESSAGES, PARAMS).prompt_token_ids,
        chat_llm.generate("hey", PARAMS)[0].prompt_token_ids,
        chat_llm.generate("<s>hey", PARAMS)[0].prompt_token_ids,
        tuple(chat_llm.encode("hey")),
    ]
    assert [prompt.count(bos) for prompt in prompts] == [1] * 4
    assert prompts[1] == prompts[2] == prompts[3] == tuple(ids_of("<s>", "hey"))
    assert chat_llm.generate([ids_of("hey")], PARAMS)[0].prompt_token_ids == tuple(
        ids_of("hey")
    )  # ids are taken as such


def test_an_empty_text_with_a_bos_is_a_prompt(chat_llm: LLM) -> None:
    (completion,) = chat_llm.generate("", PARAMS)
    assert completion.prompt_token_ids == tuple(ids_of("<s>"))
    assert len(completion.token_ids) == 12


@pytest.mark.parametrize(
    ("template", "tail"),
    [({}, ["<b>"]), ({"enable_thinking": True}, ["<b>"]), ({"enable_thinking": False}, ["<b>", "<d>"]),
     ({"add_generation_prompt": False}, []), ({"unknown": 3}, ["<b>"])],
    ids=str,
)  # fmt: skip
def test_br_053_template_keywords_reach_the_template(chat_llm: LLM, template: dict[str, Any], tail: list[str]) -> None:
    expected = tuple(ids_of("<s>", "<a>", "user:hey", *tail))
    completion = chat_llm.chat(MESSAGES, PARAMS, **template)
    assert completion.prompt_token_ids == expected
    *_, last = chat_llm.stream(MESSAGES, PARAMS, **template)
    assert last.completion is not None
    assert (last.completion.prompt_token_ids, last.completion.text) == (expected, completion.text)


@pytest.mark.parametrize("name", ["messages", "prompt", "params", "tools"])
def test_br_053_template_keywords_may_have_any_name(tmp_path: Path, name: str) -> None:
    """A client's keyword that is also the name of an argument here: the template gets it, or it is refused by name."""
    tiny.save(tiny.reference_model("llama"), tmp_path)
    llm = LLM(str(write_tokenizer(tmp_path, chat_template=f"{{{{ {name} }}}}")), max_model_len=64)
    if name == "messages":
        for call in (llm.encode_chat, llm.chat, llm.stream):
            with pytest.raises(ValueError, match="'messages' is reserved"):
                call(MESSAGES, **{name: "x"})
    elif name == "tools":
        with pytest.raises(ValueError, match=r"^tools must be a list, not str"):
            llm.encode_chat(MESSAGES, **{name: "x"})
    else:
        assert llm.encode_chat(MESSAGES, **{name: "x"}) == ids_of("x")
    if name == "prompt":
        assert llm.chat(MESSAGES, params=PARAMS, **{name: "x"}).prompt_token_ids == tuple(ids_of("x"))
        *_, last = llm.stream(MESSAGES, params=PARAMS, **{name: "x"})
        assert last.completion is not None
        assert last.completion.prompt_token_ids == tuple(ids_of("x"))


@pytest.mark.parametrize("params", ["x", {"max_tokens": 3}, 3, ["x"], 0, ""])
def test_params_of_another_kind_are_refused(chat_llm: LLM, params: Any) -> None:
    calls = [lambda: chat_llm.generate("hey", params), lambda: chat_llm.chat("hey", params=params)]
    calls += [] if isinstance(params, list) else [lambda: chat_llm.stream("hey", params)]
    for call in calls:
        with pytest.raises(ValueError, match=r"^params must be SamplingParams, was "):
            call()
    assert_idle(chat_llm)


def test_template_keywords_beside_a_text_are_refused(chat_llm: LLM) -> None:
    """They would be ignored without a word: `stream` takes a text as it is."""
    with pytest.raises(ValueError, match=r"prompt must be a list of messages for template keywords.*enable_thinking"):
        chat_llm.stream("hey", PARAMS, enable_thinking=False)
    assert_idle(chat_llm)


def test_a_chat_without_a_template_is_refused(llm: LLM) -> None:
    for call in (llm.chat, llm.stream):
        with pytest.raises(ValueError, match="no chat template"):
            call(MESSAGES, PARAMS)


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "hi"}], [5], None])
def test_malformed_messages_are_refused(chat_llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="message"):
        chat_llm.chat(messages, PARAMS)
    assert_idle(chat_llm)


def test_a_conversation_longer_than_the_context_is_refused_with_numbers(chat_llm: LLM) -> None:
    with pytest.raises(ValueError, match="in the context of 256 tokens, was 308 tokens"):
        chat_llm.chat("x" * 300, PARAMS)


# Loading ----------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_names_the_missing_file(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=r"tokenizer\.json"):
        LLM(str(tmp_path))


def test_progress_counts_up_to_all_bytes(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    again = LLM(str(_folder(llm)), max_model_len=64, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    total = again.config.num_parameters() * again.config.dtype.itemsize
    assert seen[-1] == (total, total)


def test_end_tokens_of_all_files_are_joined(tmp_path: Path) -> None:
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (tmp_path / "tokenizer.json").write_text(byte_level_backend().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<c>"}))
    assert LLM(str(tmp_path)).engine.end_ids == {1, 2, 3}


def test_the_runner_needs_no_gradients(llm: LLM) -> None:
    """Consumers run outside inference mode; what they do between chunks is theirs."""
    chunks = llm.stream([1, 2, 3], PARAMS)
    next(chunks)
    assert not torch.is_inference_mode_enabled()
    x = torch.ones(2, requires_grad=True)
    next(chunks)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    chunks.close()


def test_generate_makes_only_last_chunks_and_a_stream_beside_it_loses_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [tokens_alone(llm, prompt, PARAMS) for prompt in ([1, 2, 3], [4, 5, 6])]
    stream = llm.stream([4, 5, 6], PARAMS)
    shown, step = [next(stream)], llm.engine.step
    owners: dict[int, int] = {}

    def counting() -> Iterator[tuple[int, Chunk]]:
        for owner, chunk in step():
            owners[owner] = owners.get(owner, 0) + 1
            yield owner, chunk

    monkeypatch.setattr(llm.engine, "step", counting)
    assert llm.generate([[1, 2, 3]], PARAMS)[0].token_ids == alone[0]
    shown += stream
    assert tokens_of(shown) == alone[1]
    assert sorted(owners.values()) == [1, len(shown) - 1]
    assert len(shown) == PARAMS.max_tokens


def test_a_callers_list_stays_as_it_is(llm: LLM) -> None:
    prompt = [1, 2, 3]
    whole = llm.generate([prompt, prompt], PARAMS)
    assert prompt == [1, 2, 3]
    assert whole[0].prompt_token_ids == (1, 2, 3)
    assert whole[0].token_ids == whole[1].token_ids
    request_id = llm.engine.submit(prompt, PARAMS)
    while llm.engine.is_open(request_id):
        list(llm.engine.step())
    assert prompt == [1, 2, 3]


@pytest.mark.parametrize(("bad", "found"), [([0, -1], "-1 to 0"), ([-(2**63)], "to -9223"), ([2**63 - 1, 5], "5 to 9")])
def test_ids_at_both_ends_of_64_bits_are_refused(llm: LLM, bad: list[int], found: str) -> None:
    with pytest.raises(ValueError, match=f"prompt must have token ids below {llm.config.vocab_size}, .*{found}"):
        llm.generate([bad], PARAMS)
