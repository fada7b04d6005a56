"""`rooflight explain MODEL`: where the time of a step must go on a card, without the card. `--trace`: where it went."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = """[bold]Examples[/bold]

rooflight explain random:qwen3-0.6b

rooflight explain random:qwen3-8b --gpu rtx4090 --context 8192 --what-if kv=fp8,weights=w4

rooflight explain random:llama-3.2-1b --phase prefill --batch 4 --context 2048 --html report.html

rooflight explain random:qwen3-0.6b --accuracy results/h200

rooflight explain random:qwen3-0.6b --measure --sweep --out results/h200

rooflight explain --trace trace.json.gz"""
EMBEDDED = "the embedded default"


def explain(
    model: Annotated[
        str | None,
        typer.Argument(
            show_default="the embedded default",
            help="A folder with safetensors, a .gguf file, a hub name (owner/name) or random:<preset>.",
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="CARD", help="h200, h100, a100, l4, l40s, rtx4090, b200, …")] = "h200",
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences in a step.")] = 1,
    context: Annotated[
        int, typer.Option(metavar="T", help="Tokens of each: in the cache before a decode step, new in a prefill.")
    ] = 1024,
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="auto (the model's own; BF16 for FP32), fp32, bf16 or fp16.")
    ] = "auto",
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="CHANGES",
            help="kv=fp8,head=w8,weights=w4,compute=fp8,batch=8,context=…,tp=2,gpu=…: what would change.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained page with charts as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    accuracy: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="How well limits foretell the times measured there (results/h200): fitted on MODEL's width alone.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="On a GPU: measure the step and its operators, and compare.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="With --measure: batches of 1, 8, 64 with 128, 1024, 8192 tokens each.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --measure: folder for explain_measured.json and CSV.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Explain a trace of torch.profiler (.json, .json.gz) instead of a model."),
    ] = None,
) -> None:
    """Show each operator's bytes, operations, wall and limit in a step, and what would move it; no GPU is needed."""
    if not measure and (sweep or out is not None):
        raise ValueError("--sweep and --out are for --measure")
    if measure and (trace, accuracy, what_if, html) != (None, None, None, None):
        raise ValueError("--measure takes no --trace, --accuracy, --what-if or --html")
    if measure:
        _measure(model, batch, context, phase, dtype, sweep, out, as_json)
    elif trace is not None:
        if (model, what_if, html, accuracy) != (None, None, None, None):
            raise ValueError("--trace explains a file: it takes no MODEL, --what-if, --html or --accuracy")
        _trace(trace, gpu, as_json)
    elif accuracy is not None:
        if (what_if, html) != (None, None):
            raise ValueError("--accuracy judges what was measured: it takes no --what-if or --html")
        _accuracy(model, gpu, accuracy, as_json)
    else:
        _model(model, gpu, batch, context, phase, dtype, what_if, html, as_json)


def _measure(
    model: str | None,
    batch: int,
    context: int,
    phase: str,
    dtype: str,
    sweep: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    from rooflight.bench import results, step_report
    from rooflight.cli.bar import bar
    from rooflight.cli.profile_tables import show_measured
    from rooflight.limits.trace import Step

    asked = [Step(phase, *pair) for pair in step_report.SWEEP] if sweep else [Step(phase, batch, context)]
    setup = step_report.StepsSetup(model, tuple(asked), dtype=dtype)
    if out is not None:
        results.prepare(out)
    with bar() as progress:
        report = step_report.run(setup, progress)
    data = report.as_data("explain")
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        if not sweep:  # what it should take, as without a GPU
            _model(model, step_report.card_here().key, batch, context, phase, dtype, None, None, False)
        show_measured(report)
    if out is not None:
        for path in results.write(out, "explain_measured", data):
            typer.echo(f"wrote {path}", err=as_json)


def _trace(path: Path, gpu: str, as_json: bool) -> None:
    from rich.console import Console

    from rooflight.cli.explain_trace import explain_trace
    from rooflight.limits.ceilings import ceilings

    explain_trace(path, ceilings(gpu), as_json, Console(highlight=False))


def _accuracy(model: str | None, gpu: str, folder: Path, as_json: bool) -> None:
    from rooflight.cli import explain_tables
    from rooflight.limits.accuracy import accuracy
    from rooflight.limits.ceilings import ceilings
    from rooflight.models.load import load_config

    config = load_config(model)
    fits = accuracy(config, ceilings(gpu), folder)
    if as_json:
        print(json.dumps([asdict(fit) for fit in fits], indent=1))
    else:
        explain_tables.show_accuracy(model or EMBEDDED, config.hidden_size, fits)


def _model(
    model: str | None,
    gpu: str,
    batch: int,
    context: int,
    phase: str,
    dtype: str,
    changes: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    import torch

    from rooflight.cli import explain_tables
    from rooflight.cli.model_facts import dtype_of
    from rooflight.limits.advice import advise, what_if
    from rooflight.limits.explanation import explain as explain_step
    from rooflight.limits.scenario import Scenario
    from rooflight.limits.trace import Step
    from rooflight.models.load import load_config

    config = load_config(model)
    kept = dtype_of(dtype, config)
    if dtype == "auto" and kept == torch.float32:
        kept = torch.bfloat16  # as a quantised file, or one without a dtype of its own, is loaded on a GPU
    config = replace(config, dtype=kept)
    name = model or EMBEDDED
    scenario = Scenario(Step(phase, batch, context), gpu)
    found = explain_step(name, config, scenario)
    advice = advise(config, found)
    results = what_if(name, config, scenario, changes) if changes is not None else []
    if html is not None:
        from rooflight.limits.report import report

        html.write_text(report(config, found, advice, results), encoding="utf-8")
    if as_json:
        _print_json(found, advice, results)
    else:
        explain_tables.show(found, advice, results, html)


def _print_json(found: Any, advice: Any, results: Any) -> None:
    data = found.as_data() | {
        "advice": [asdict(piece) for piece in advice],
        "what_if": [{"what": r.what, "gain": r.gain, "after": r.after.as_data()} for r in results],
    }
    print(json.dumps(data, indent=1))
