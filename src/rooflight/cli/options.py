"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rooflight.engine import SamplingParams

_MODEL, _SAMPLING = "Model", "Sampling and stopping"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        show_default="the embedded SmolLM2-135M-Instruct, if installed",
        help="A folder with safetensors, a .gguf file or a name on the Hugging Face Hub (owner/name).",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(metavar="TYPE", help="auto (the file's own), fp32, bf16 or fp16.", rich_help_panel=_MODEL),
]
Device = Annotated[
    str,
    typer.Option(metavar="NAME", help="auto (a GPU if there is one), cpu, cuda, cuda:1, …", rich_help_panel=_MODEL),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        show_default="the model's, at most 8192 on a CPU",
        help="Context: most tokens of prompt and answer together.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", show_default="PyTorch's choice", help="CPU threads.", rich_help_panel=_MODEL),
]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(metavar="K", help="Keep the K likeliest; 0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float,
    typer.Option(metavar="P", help="Keep the likeliest that reach P together; 1 is off.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float,
    typer.Option(metavar="P", help="Drop those below P times the likeliest; 0 is off.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", show_default="drawn", help="Same seed, same text.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the conversation.")]
Template = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Argument of the chat template, such as enable_thinking=false; the value is JSON or text. Repeatable.",
    ),
]
Stats = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        show_default="if stderr is a terminal",
        help="A line of token counts and times on stderr after each answer.",
    ),
]


def sampling(
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: Sequence[str] | None,
) -> SamplingParams:
    """Checked before a model is loaded: a wrong value should not cost a minute."""
    from rooflight.engine import SamplingParams  # with tokenizers and jinja2 0.2 s, which `info` does without

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )


def template_arguments(pairs: Sequence[str] | None) -> dict[str, Any]:
    """`["enable_thinking=false", "style=short"]` -> `{"enable_thinking": False, "style": "short"}`."""
    arguments = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--template must be KEY=VALUE with a name as key, was {pair!r}")
        arguments[key] = _value(value)
    return arguments


def _value(text: str) -> Any:
    """JSON if it is; True and False too, since as text the latter would count as true in a template."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
