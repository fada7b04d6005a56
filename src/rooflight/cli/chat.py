"""`rooflight chat`: a conversation on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflight.cli import loading, options, output
from rooflight.cli.errors import describe

if TYPE_CHECKING:
    from rooflight.cli.conversation import Conversation

EPILOG = """[bold]Examples[/bold]

rooflight chat

rooflight chat --model Qwen/Qwen3-0.6B --template enable_thinking=false --temperature 0.7

rooflight chat --model ./my-model --system "You answer in one sentence." --dtype bf16"""

HELP = """/clear  start anew (the system message stays)
/help   this list
/exit   leave, as does Ctrl-D
Ctrl-C  stop the answer"""


def chat(
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most tokens of one answer.", rich_help_panel="Sampling and stopping")
    ] = 1024,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    system: options.System = None,
    template: options.Template = None,
    stats: options.Stats = None,
) -> None:
    """Talk with a model. Answers come as they are made; /help lists what can be typed besides."""
    params = options.sampling(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    arguments = options.template_arguments(template)
    with _keys_not_shown():
        opened = loading.open_model(model, dtype=dtype, device=device, max_model_len=max_model_len, threads=threads)
    from rooflight.cli.conversation import Conversation

    conversation = Conversation(opened, params, system, arguments)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # line editing and history, where Python has it
            import readline  # noqa: F401
        name = Path(opened.name).name
        _note(f"{name} · {opened.dtype} on {opened.device} · context {conversation.context:,} tokens · /help")
    _loop(conversation, max_tokens, stats)


def _loop(conversation: Conversation, max_tokens: int, stats: bool | None) -> None:
    while True:
        try:
            line = _read_line().strip()
            if line == "/exit":
                return
            if line == "/clear":
                conversation.clear()
                _note("a new conversation")
            elif line == "/help":
                _note(HELP)
            elif line.startswith("/") and " " not in line:  # with more words it may be a question about a path
                _note(f"{line} is not known; /help lists what is")
            elif line:
                with _keys_not_shown():
                    _answer(conversation, line, max_tokens, stats)
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        except KeyboardInterrupt:
            print()
            _note("Ctrl-D or /exit leaves")


def _answer(conversation: Conversation, question: str, max_tokens: int, stats: bool | None) -> None:
    """One turn. What goes wrong in it is said in a line, and the chat goes on."""
    writer = output.Writer()
    try:
        completion = output.stream(conversation.ask(question), writer)
    except ValueError as error:
        _note(f"rooflight: {describe(error)[1]}")
        return
    except KeyboardInterrupt:
        if writer.text:  # what the person has read is part of the conversation
            conversation.answered(question, writer.text)
        _note("stopped")
        return
    if completion.error is not None:
        _note(f"rooflight: {completion.error}")
        return
    conversation.answered(question, completion.text)
    if conversation.fills_context(completion):
        used = len(completion.prompt_token_ids) + len(completion.token_ids)
        _note(f"context full: {used} of {conversation.context} tokens are used, the answer was cut; /clear empties it")
    elif completion.finish_reason == "length":
        _note(f"the answer was cut at --max-tokens {max_tokens}")
    output.show_figures(completion, stats)


@contextlib.contextmanager
def _keys_not_shown() -> Iterator[None]:
    """What is typed ahead stays out of the answer; it appears at the next prompt. Ctrl-C works."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    flags = before[3] & ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, [*before[:3], flags, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _read_line() -> str:
    """A line from the person, with a prompt, or from a pipe, without."""
    if not sys.stdin.isatty():
        return input()
    if not sys.stdout.isatty():  # the answers go to a file, and the prompt should not
        print("› ", end="", file=sys.stderr, flush=True)
        return input()
    print()
    # The marks keep readline from counting the colour codes as columns.
    return input("\001\033[1;36m\002› \001\033[0m\002")


def _note(text: str) -> None:
    """What the program says, as against the model: dim, on stderr."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)
