"""`rooflight chat`: over a pipe for its logic, on a terminal for its keys."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.cli.running import Terminal, invoke, refused
from tests.cli.speller import LETTERS, spell

HI_TOKENS = 1 + 5 + 2 + 1 + 2  # "<|start|>user:" "hi" "<|end|>" "<|start|>\n"
TURN_TOKENS = 1 + 10 + 26 + 1 + 9  # "<|start|>assistant:" the letters "<|end|>", and the next "<|start|>user:hi<|end|>"


def tokens_in(stderr: str) -> list[int]:
    return [int(count) for count in re.findall(r"^(\d+) tokens in", stderr, re.MULTILINE)]


def test_keeps_the_conversation_and_clears_it(speller: Path) -> None:
    result = invoke("chat", "-m", speller, "--stats", stdin="hi\nhi\n\n/clear\nhi\n/exit\nnot read\n")
    assert (result.exit_code, result.stdout) == (0, f"{LETTERS}\n" * 3)
    assert tokens_in(result.stderr) == [HI_TOKENS, HI_TOKENS + TURN_TOKENS, HI_TOKENS]
    assert "a new conversation\n" in result.stderr


def test_the_end_of_the_pipe_ends_the_chat(speller: Path) -> None:
    result = invoke("chat", "-m", speller, stdin="hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, LETTERS + "\n", "")


def test_the_system_message_survives_clear(speller: Path) -> None:
    result = invoke("chat", "-m", speller, "--stats", "--system", "be brief", stdin="hi\n/clear\nhi\n")
    assert tokens_in(result.stderr) == [HI_TOKENS + len("<system:be brief>")] * 2


def test_template_arguments_reach_every_turn(speller: Path) -> None:
    result = invoke("chat", "-m", speller, "--template", "start=w", stdin="hi\nhi\n")
    assert result.stdout == "xyz\nxyz\n"


def test_help_and_unknown_commands(speller: Path) -> None:
    result = invoke("chat", "-m", speller, stdin="/help\n/quit\n/etc/passwd is what?\n")
    assert result.stdout == LETTERS + "\n"  # a question that begins with a path is a question
    for command in ("/clear", "/help", "/exit", "Ctrl-D", "Ctrl-C"):
        assert command in result.stderr
    assert result.stderr.endswith("/quit is not known; /help lists what is\n")


def test_a_full_context_is_said_with_both_numbers_and_can_be_cleared(speller: Path) -> None:
    context = HI_TOKENS + 30
    stdin = "hi\nhi\n/clear\nhi\n"
    result = invoke("chat", "-m", speller, "--max-model-len", str(context), stdin=stdin)
    assert result.exit_code == 0
    assert result.stdout == f"{LETTERS}\n" * 2
    needed = HI_TOKENS + TURN_TOKENS
    line = f"rooflight: context full: this makes {needed} tokens, the context is {context}; /clear empties it\n"
    assert result.stderr == line + "a new conversation\n"


def test_an_answer_that_the_context_cuts_is_said_to_be_cut(speller: Path) -> None:
    result = invoke("chat", "-m", speller, "--max-model-len", "21", stdin="hi\n")
    assert result.stdout == LETTERS[:10] + "\n"
    line = "context full: 21 of 21 tokens are used, the answer was cut; /clear empties it\n"
    assert result.stderr == line


def test_an_answer_that_max_tokens_cuts_is_said_to_be_cut(speller: Path) -> None:
    result = invoke("chat", "-m", speller, "--max-tokens", "3", stdin="hi\n")
    assert (result.stdout, result.stderr) == ("abc\n", "the answer was cut at --max-tokens 3\n")


def test_a_question_that_fails_leaves_no_trace(speller: Path) -> None:
    result = invoke("chat", "-m", speller, "--stats", stdin="!\nhi\n")
    assert result.exit_code == 0
    assert result.stdout == LETTERS + "\n"
    assert result.stderr.startswith("rooflight: the model gave no finite logits (NaN, or all -inf)\n")
    assert tokens_in(result.stderr) == [HI_TOKENS]


def test_what_is_wrong_with_the_template_is_said_before_the_first_question(speller: Path, tmp_path: Path) -> None:
    reserved = refused("chat", "-m", speller, "--template", "messages=1", stdin="hi\n")
    assert reserved == "chat template variable 'messages' is reserved"
    assert "has no chat template" in refused("chat", "-m", spell(tmp_path, template=None), stdin="hi\n")


def test_a_whole_chat_on_a_terminal(speller: Path) -> None:
    with Terminal("chat", "--model", speller) as terminal:
        terminal.expect(rf"{speller.name} · fp32 on cpu · context 8,192 tokens · /help\n\n› ")
        terminal.type("hi\r")
        terminal.expect(rf"hi\n{LETTERS}\n{HI_TOKENS} tokens in, 27 out \(stop\) · first .* tokens/s\n\n› ")

        terminal.type("go on\r")  # without end
        terminal.expect("ABCDEFGHIJKLMNOPQRSTUVWXYZABC")
        terminal.type("\x03")
        terminal.expect(r"[A-Z]*\nstopped\n\n› ")

        terminal.type("hi\r")  # the chat goes on, and what was said is part of it
        count = int(terminal.expect(rf"{LETTERS}\n(\d+) tokens in").group(1))
        assert count > HI_TOKENS + TURN_TOKENS + len("ABCDEFGHIJKLMNOPQRSTUVWXYZABC")
        terminal.expect("\n\n› ")

        terminal.type("go on\r")  # what is typed meanwhile does not show inside the answer
        terminal.expect("ABCDEFGHIJKLMNOPQRSTUVWXYZABC")
        terminal.type("typed ahead\x03")
        between = terminal.expect(r"([^›]*)stopped\n\n› ").group(1)
        assert "typed" not in between

        terminal.type("half a ques")
        terminal.expect("half a ques")
        time.sleep(0.2)  # readline shows the last key before it waits for the next, and Python misses a Ctrl-C between
        terminal.type("\x03")
        terminal.expect("Ctrl-D or /exit leaves\n\n› ")
        terminal.type("\x04")
        assert terminal.leave() == 0
        assert terminal.echoes
        assert "Traceback" not in terminal.shown
