"""The `rooflight` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from rooflight import __version__
from rooflight.cli import bench, chat, explain, generate, info, kernels, ladder, profile
from rooflight.cli.errors import OneLineErrors

app = typer.Typer(
    name="rooflight",
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=generate.EPILOG)(generate.generate)
app.command(epilog=chat.EPILOG)(chat.chat)
app.command(epilog=info.EPILOG)(info.info)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command(epilog=profile.EPILOG)(profile.profile)
app.command(epilog=kernels.EPILOG)(kernels.kernels)
app.add_typer(bench.app, name="bench")
app.add_typer(ladder.app, name="ladder")

EPILOG = """[bold]Examples[/bold]

rooflight generate "Why is the sky blue? Answer in two sentences."

rooflight chat --model Qwen/Qwen3-0.6B

rooflight info random:qwen3-0.6b"""


@app.callback(invoke_without_command=True, epilog=EPILOG)
def rooflight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Language models on operators that are each measured next to their limit."""
    if version:
        typer.echo(f"rooflight {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The entry point of the package: run the command that the arguments name, and exit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? rather than nothing
    app(prog_name="rooflight")


if __name__ == "__main__":
    main()
