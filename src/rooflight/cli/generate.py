"""`rooflight generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooflight.cli import loading, options, output
from rooflight.cli.errors import Failure

if TYPE_CHECKING:
    from rooflight.text import Tokenizer

EPILOG = """[bold]Examples[/bold]

rooflight generate "Why is the sky blue? Answer in two sentences."

rooflight generate --raw "The capital of France is" --max-tokens 5

git diff | rooflight generate --system "Write a commit message for this diff." -

rooflight generate "Name a colour." --temperature 0.8 --seed 1 --json"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text; `-`, or none with a pipe, reads it from stdin.", show_default=False)
    ] = None,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most tokens to generate.", rich_help_panel="Sampling and stopping")
    ] = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default="--chat if the model has a chat template",
            help="Ask as a user in a chat, or continue the bare text.",
        ),
    ] = None,
    system: options.System = None,
    template: options.Template = None,
    stats: options.Stats = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, counts and times instead.")
    ] = False,
) -> None:
    """Answer a question, or continue a text. The text goes to stdout as it comes."""
    params = options.sampling(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    arguments = options.template_arguments(template)
    text = _prompt(prompt)
    opened = loading.open_model(model, dtype=dtype, device=device, max_model_len=max_model_len, threads=threads)
    ids = _encode(opened.tokenizer, text, chat, system, arguments)
    if as_json:
        completion = opened.llm.generate([ids], params)[0]
        about = {"model": opened.name, "dtype": opened.dtype, "device": opened.device, "text": completion.text}
        print(json.dumps(about | output.figures(completion), ensure_ascii=False))
    else:
        completion = output.stream(opened.llm.stream(ids, params), output.Writer())
    output.show_figures(completion, stats if stats is not None or not as_json else False)
    if completion.error is not None:
        raise Failure(completion.error)


def _prompt(prompt: str | None) -> str:
    """The argument, or stdin without its last line break, which belongs to the line and not to the text."""
    if prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument, or pipe it in (see `rooflight generate --help`)")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.read().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt must be UTF-8 text: {error}") from error
    if not prompt:
        raise ValueError("prompt must not be empty")
    return prompt


def _encode(
    tokenizer: Tokenizer, text: str, chat: bool | None, system: str | None, arguments: dict[str, Any]
) -> list[int]:
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        if system is not None or arguments:
            raise ValueError("--system and --template need a chat template: not with --raw, or for a model without one")
        return tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}], **arguments)
