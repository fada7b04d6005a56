"""`rooflight profile`: a decode step and a prompt of ours, every kernel with its operator, limit and wall."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """[bold]Examples[/bold]

rooflight profile --model random:qwen3-0.6b --context 1024

rooflight profile --model random:qwen3-0.6b --batch 64 --context 8192 --steps 64 --out build/profile"""
NAME = "profile"


def profile(
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file, hub name or random:<preset>; default: the embedded one.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences of the decode step.")] = 1,
    context: Annotated[int, typer.Option(metavar="T", help="Tokens of each in the cache.")] = 1024,
    prompt_tokens: Annotated[int, typer.Option(metavar="T", help="Of the prompt; 0: no prompt.")] = 1024,
    steps: Annotated[int, typer.Option(metavar="N", help="Decode steps to record, in whole launches.")] = 32,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="auto (the model's own; BF16 for FP32) or one.")] = "auto",
    foretell: Annotated[
        bool, typer.Option(help="Measure the operators alone first, and foretell the step from them.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for JSON and CSV.", show_default="none is written")
    ] = None,
) -> None:
    """Record a decode step and a prompt on the GPU, and print where their time goes, kernel by kernel."""
    from rooflight.bench import results, step_report
    from rooflight.cli.bar import bar
    from rooflight.cli.profile_tables import show_profile
    from rooflight.limits.trace import Step

    decode, prompt = Step("decode", batch, context), Step("prefill", 1, prompt_tokens)
    asked = (decode, prompt) if prompt_tokens else (decode,)
    setup = step_report.StepsSetup(model, asked, steps, foretell, dtype)
    if out is not None:
        results.prepare(out)
    with bar() as progress:
        report = step_report.run(setup, progress)
    for found in report.profiles:
        show_profile(found)
    if out is not None:
        for path in results.write(out, NAME, report.as_data(NAME)):
            typer.echo(f"wrote {path}")
