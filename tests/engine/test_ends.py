"""How requests end: end tokens from every file, stop strings, lengths; scripted, so that every token is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rooflight import LLM, SamplingParams
from tests.engine.conftest import Checkpoints
from tests.engine.late import in_every_mode
from tests.engine.support import Script, assert_idle, ids_of, play, write_tokenizer
from tests.models import tiny

pytestmark = in_every_mode

A, B, C, D = ids_of("<a>", "<b>", "<c>", "<d>")
Q = ids_of("q")[0]  # an ordinary token that the generation config calls an end


@pytest.fixture(scope="module")
def ends_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """generation_config ends [a, b, "q"], config end a, tokenizer end c; d is special and no end."""
    folder = tmp_path_factory.mktemp("ends")
    tiny.save(tiny.reference_model("qwen3"), folder)
    tiny.edit_config(folder, eos_token_id=A)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [A, B, Q]}))
    write_tokenizer(folder, eos_token="<c>")
    return LLM(str(folder), page_size=4, max_model_len=200)


@pytest.fixture
def ends(ends_llm: LLM, mode: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(ends_llm.engine.scheduler, "most_steps", mode[1])
    yield ends_llm
    assert_idle(ends_llm)


END = pytest.mark.parametrize("end", [A, B, C, Q], ids=["a", "b", "c", "q"])


@END
@pytest.mark.parametrize("before", ["", "x", "alpha"])
def test_br_050_stops_on_every_end_token_without_printing_it(
    monkeypatch: pytest.MonkeyPatch, ends: LLM, end: int, before: str
) -> None:
    line = [*ids_of(before), end, *ids_of("more")]
    completion, _ = play(monkeypatch, ends, line, max_tokens=12)
    assert (completion.text, completion.finish_reason) == (before, "stop")
    assert completion.token_ids == (*ids_of(before), end)


def test_br_050_a_special_token_that_is_no_end_goes_on_unprinted(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, _ = play(monkeypatch, ends, [*ids_of("m"), D, *ids_of("n"), A], max_tokens=12)
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("mn", "stop", 4)


@END
def test_br_050_ignore_eos_runs_to_max_tokens(monkeypatch: pytest.MonkeyPatch, ends: LLM, end: int) -> None:
    line = [*ids_of("m"), end, *ids_of("n"), A, B, C, *ids_of("o")]
    completion, _ = play(monkeypatch, ends, line, max_tokens=7, ignore_eos=True)
    assert (completion.finish_reason, completion.token_ids) == ("length", tuple(line))
    assert completion.text == ("mqno" if end == Q else "mno")  # special tokens are no text, ordinary ones are


@END
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_br_050_no_end_token_before_min_tokens(
    monkeypatch: pytest.MonkeyPatch, ends: LLM, end: int, temperature: float
) -> None:
    options = {"max_tokens": 12, "min_tokens": 5, "temperature": temperature}
    completion, _ = play(monkeypatch, ends, [end] * 12, **options)
    assert (completion.text, completion.finish_reason) == ("xxxxx", "stop")
    assert completion.token_ids == (*ids_of("xxxxx"), end)


def test_br_050_min_tokens_up_to_max_tokens(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, _ = play(monkeypatch, ends, [A] * 12, max_tokens=5, min_tokens=5)
    assert (completion.token_ids, completion.finish_reason) == (tuple(ids_of("xxxxx")), "length")


def test_br_050_min_tokens_with_ignore_eos_masks_nothing(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, _ = play(monkeypatch, ends, [A] * 6, max_tokens=6, min_tokens=5, ignore_eos=True)
    assert (completion.token_ids, completion.finish_reason) == ((A,) * 6, "length")


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("text", ["z", "alpha", "<d>"])
def test_br_050_stop_token_ids_end_too(monkeypatch: pytest.MonkeyPatch, ends: LLM, text: str, ignore_eos: bool) -> None:
    (stop,) = ids_of(text)
    options = {"max_tokens": 9, "stop_token_ids": [500, stop], "ignore_eos": ignore_eos}
    completion, _ = play(monkeypatch, ends, [*ids_of("mn"), stop, *ids_of("rest")], **options)
    assert (completion.text, completion.finish_reason) == ("mn", "stop")
    assert completion.token_ids == (*ids_of("mn"), stop)
    completion, _ = play(monkeypatch, ends, [*ids_of("mn"), A, stop], **options)
    assert len(completion.token_ids) == (4 if ignore_eos else 3)
    completion, _ = play(monkeypatch, ends, [stop] * 9, min_tokens=3, **options)
    assert (completion.text, completion.token_ids) == ("xxx", (*ids_of("xxx"), stop))


def test_br_050_end_ids_outside_the_vocabulary_stop_nothing_and_mask_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some files say -1 for "none"; taken as an index it would forbid the last token of the vocabulary."""
    tiny.save(tiny.reference_model("qwen3"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 1000, A]}))
    llm = LLM(str(write_tokenizer(tmp_path)), max_model_len=64)
    completion, _ = play(monkeypatch, llm, [999, 999, A], max_tokens=9, min_tokens=2, stop_token_ids=[10**9])
    assert (completion.token_ids, completion.finish_reason) == ((999, 999, A), "stop")


def test_requests_of_one_batch_end_by_their_own_rules(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    lines = {1: ids_of("mn", "<a>"), 2: ids_of("m", "<c>"), 3: ids_of("mno", "STOP"), 4: ids_of("mnopqr")}
    monkeypatch.setattr(ends.engine.runner, "run", Script(ends, lines))
    options = [{}, {"ignore_eos": True}, {"stop": "STOP"}, {}]
    results = ends.generate([[k] for k in lines], [SamplingParams(max_tokens=5, **o) for o in options])  # type: ignore[arg-type]
    assert [r.text for r in results] == ["mn", "mxxx", "mno", "mnop"]
    assert [r.finish_reason for r in results] == ["stop", "length", "stop", "stop"]


# Stop strings -----------------------------------------------------------------------------------------------------

BETA = [
    ids_of("alpha", " beta", " gamma", " delta"),
    ids_of("alpha be", "ta ga", "mma", " delta"),
    ids_of("alpha beta gamma delta"),  # byte by byte
]
WAYS = pytest.mark.parametrize("line", BETA, ids=["words", "crooked", "bytes"])


@WAYS
def test_br_049_a_stop_string_across_tokens(monkeypatch: pytest.MonkeyPatch, ends: LLM, line: list[int]) -> None:
    completion, shown = play(monkeypatch, ends, line, max_tokens=30, stop="beta gamma")
    assert (completion.text, completion.finish_reason) == ("alpha ", "stop")
    assert not any("b" in text for text in shown)
    assert 0 < len(completion.token_ids) <= len(line)


@WAYS
def test_br_049_a_stop_string_inside_a_token(monkeypatch: pytest.MonkeyPatch, ends: LLM, line: list[int]) -> None:
    completion, _ = play(monkeypatch, ends, line, max_tokens=30, stop=["gamma"])
    assert (completion.text, completion.finish_reason) == ("alpha beta ", "stop")
    completion, _ = play(monkeypatch, ends, line, max_tokens=30, stop=["lph"])
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_br_049_the_rest_of_the_token_that_completes_a_stop_string_is_dropped(
    monkeypatch: pytest.MonkeyPatch, ends: LLM
) -> None:
    completion, _ = play(monkeypatch, ends, ids_of("alpha be", "ta ga", "mma"), max_tokens=30, stop="beta g")
    assert (completion.text, completion.token_ids) == ("alpha ", tuple(ids_of("alpha be", "ta ga")))


@pytest.mark.parametrize("end", ["<a>", None])
def test_br_049_a_false_start_is_delivered_in_full(monkeypatch: pytest.MonkeyPatch, ends: LLM, end: str | None) -> None:
    """In the middle, and as the last thing before an end token or max_tokens."""
    line = ids_of("alpha", " beta", " gala", " beta", " ga", *([end] if end else []))
    completion, _ = play(monkeypatch, ends, line, max_tokens=len(line), stop="beta gamma")
    assert completion.text == "alpha beta gala beta ga"
    assert completion.finish_reason == ("stop" if end else "length")


@WAYS
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["beta gamma", "gamma"], "alpha "),  # complete together: the longer
        (["gamma", "beta gamma"], "alpha "),
        (["beta gamma delta", "ta g"], "alpha be"),  # complete first
        (["beta gala", "a gamma d"], "alpha bet"),
        (["pha beta", "beta gamma"], "al"),
        (["zzz", "delta"], "alpha beta gamma "),
    ],
)
def test_br_049_several_stop_strings_that_overlap(
    monkeypatch: pytest.MonkeyPatch, ends: LLM, line: list[int], stops: list[str], text: str
) -> None:
    completion, _ = play(monkeypatch, ends, line, max_tokens=30, stop=stops)
    assert (completion.text, completion.finish_reason) == (text, "stop")


def test_br_049_on_the_last_allowed_token_it_is_still_a_stop(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, _ = play(monkeypatch, ends, ids_of("alpha", "STOP"), max_tokens=2, stop="STOP")
    assert (completion.text, completion.finish_reason) == ("alpha", "stop")


def test_br_049_no_stop_string_before_min_tokens(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    line = ids_of("STOP", "m", "STOP", "n", "STOP", "o")
    completion, _ = play(monkeypatch, ends, line, max_tokens=12, min_tokens=4, stop="STOP")
    assert (completion.text, completion.finish_reason) == ("STOPmSTOPn", "stop")


def test_br_049_special_tokens_do_not_break_a_stop_string(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, _ = play(monkeypatch, ends, ids_of("mS", "<d>", "TOPn"), max_tokens=12, stop="STOP")
    assert (completion.text, completion.finish_reason) == ("m", "stop")


# Characters -------------------------------------------------------------------------------------------------------

TEXTS = [
    "A llama 🦙 says hi",
    "family 👨‍👩‍👧‍👦 and flag 🇰🇷",
    "안녕하세요, 한국어",
    "你好，世界。龘",
    "naïve café, ½ €",
    "plain",
    "𝔘𝔫𝔦 ́ᄒ",
    "안🦙녕",
]


@pytest.mark.parametrize("text", TEXTS)
def test_br_047_characters_come_whole(monkeypatch: pytest.MonkeyPatch, ends: LLM, text: str) -> None:
    completion, shown = play(monkeypatch, ends, ids_of(text, "<a>"), max_tokens=100)
    assert completion.text == text
    assert "\ufffd" not in "".join(shown)
    assert [character for piece in shown for character in piece] == list(text)
    for piece in shown:  # byte tokens: one character at a time, with its last byte
        assert len(piece) <= 1


def test_br_047_a_batch_of_streams_read_in_turns(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    lines = {100 + i: ids_of(text, "<a>") for i, text in enumerate(TEXTS)}
    monkeypatch.setattr(ends.engine.runner, "run", Script(ends, lines))
    params = SamplingParams(max_tokens=60)
    streams = [ends.stream([key], params) for key in lines]
    texts = [""] * len(streams)
    left = dict(enumerate(streams))
    while left:
        for index, chunks in list(left.items()):
            chunk = next(chunks, None)
            if chunk is None:
                del left[index]
            else:
                texts[index] += chunk.text
    assert texts == TEXTS
    assert [r.text for r in ends.generate([[key] for key in lines], params)] == TEXTS


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_br_047_a_cut_inside_a_character_shows_one_replacement_at_the_very_end(
    monkeypatch: pytest.MonkeyPatch, ends: LLM, cut: int
) -> None:
    completion, shown = play(monkeypatch, ends, ids_of("m🦙n"), max_tokens=1 + cut)
    assert (completion.text, completion.finish_reason) == ("m\ufffd", "length")
    assert shown == ["m", *[""] * (cut - 1), "\ufffd"]
    completion, _ = play(monkeypatch, ends, [*ids_of("m🦙n")[: 1 + cut], A], max_tokens=9)
    assert (completion.text, completion.finish_reason) == ("m\ufffd", "stop")


def test_br_047_the_replacement_of_a_cut_character_may_complete_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, ends: LLM
) -> None:
    completion, _ = play(monkeypatch, ends, ids_of("mn🦙"), max_tokens=3, stop="n\ufffd")
    assert (completion.text, completion.finish_reason) == ("m", "stop")


def test_br_047_stop_strings_of_whole_characters(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, _ = play(monkeypatch, ends, ids_of("안녕 🦙🦙 안"), max_tokens=40, stop="🦙 ")
    assert (completion.text, completion.finish_reason) == ("안녕 🦙", "stop")


# Lengths ----------------------------------------------------------------------------------------------------------


def test_max_tokens_0_gives_an_empty_completion_and_runs_nothing(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    script = Script(ends, ids_of("mno"))
    monkeypatch.setattr(ends.engine.runner, "run", script)
    (completion,) = ends.generate([[1, 2, 3]], SamplingParams(max_tokens=0))
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "length")
    assert completion.prompt_token_ids == (1, 2, 3)
    assert completion.timing.total >= completion.timing.first_token >= 0
    (chunk,) = ends.stream([1, 2, 3], SamplingParams(max_tokens=0))
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), "length")
    assert script.steps == 0


def test_max_tokens_0_beside_a_request_that_runs(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    monkeypatch.setattr(ends.engine.runner, "run", Script(ends, ids_of("mno")))
    results = ends.generate([[1], [2]], [SamplingParams(max_tokens=0), SamplingParams(max_tokens=2)])
    assert [r.text for r in results] == ["", "mn"]


def test_max_tokens_1(monkeypatch: pytest.MonkeyPatch, ends: LLM) -> None:
    completion, shown = play(monkeypatch, ends, ids_of("mno"), max_tokens=1)
    assert (completion.text, shown, completion.finish_reason) == ("m", ["m"], "length")
    completion, shown = play(monkeypatch, ends, ids_of("<b>"), max_tokens=1)
    assert (completion.text, shown, completion.finish_reason) == ("", [""], "stop")


def test_the_context_ends_a_request_that_may_have_more_tokens(ends: LLM) -> None:
    for length in (1, 150, 199):
        params = SamplingParams(max_tokens=10**9, ignore_eos=True)
        (completion,) = ends.generate([[7] * length], params)
        assert (len(completion.token_ids), completion.finish_reason) == (200 - length, "length")


def test_exactly_the_room_that_is_left(ends: LLM) -> None:
    for max_tokens, expected in ((9, 9), (10, 10), (11, 10)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (completion,) = ends.generate([[7] * 190], params)
        assert (len(completion.token_ids), completion.finish_reason) == (expected, "length")


def test_the_whole_context_equals_a_longer_context(checkpoints: Checkpoints) -> None:
    """The last positions of the context are as good as any: tokens do not depend on where it ends."""
    folder, _ = checkpoints("qwen3")
    params: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1000}
    short = LLM(str(folder), max_model_len=33).generate([[7] * 20], SamplingParams(**params))[0]
    full = LLM(str(folder)).generate([[7] * 20], SamplingParams(**params))[0]
    assert (len(short.token_ids), len(full.token_ids)) == (13, 236)
    assert full.token_ids[:13] == short.token_ids
