"""`rooflight info [MODEL]`: what is here, or what a model is and takes. Tables for people or JSON for programs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

EPILOG = """[bold]Examples[/bold]

rooflight info

rooflight info random:qwen3-0.6b

rooflight info Qwen/Qwen3-0.6B --dtype fp32 --sequences 16 --context 4096

rooflight info ./model.gguf --json"""


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            show_default="this machine",
            help="A folder with safetensors, a .gguf file, a hub name (owner/name) or random:<preset>.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="auto (the model's own on a CPU), fp32, bf16 or fp16.")
    ] = "auto",
    sequences: Annotated[
        int | None, typer.Option(metavar="N", show_default="1", help="Plan memory for N sequences at a time.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="T", show_default="the model's", help="Plan memory for T tokens in each."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show this machine and the operators; or a model's shapes, bytes and memory, without loading it."""
    if model is None:
        if (dtype, sequences, context) != ("auto", None, None):
            raise ValueError("--dtype, --sequences and --context need a MODEL to be about")
        _machine(as_json)
    else:
        _model(model, dtype, sequences, context, as_json)


def _machine(as_json: bool) -> None:
    from rooflight.cli import environment, tables

    machine, providers, operators = environment.environment(), environment.providers(), environment.operators()
    if as_json:
        _print_json({**machine, "providers": providers, "operators": operators})
    else:
        tables.show_machine(machine, providers, operators)


def _model(model: str, dtype: str, sequences: int | None, context: int | None, as_json: bool) -> None:
    from rooflight.cli import model_facts, tables
    from rooflight.models.load import load_config

    config = load_config(model)
    kept = model_facts.dtype_of(dtype, config)
    plans = [model_facts.memory_plan(config, kept, 1, None)]
    if sequences is not None or context is not None:
        plans.append(model_facts.memory_plan(config, kept, 1 if sequences is None else sequences, context))
    if as_json:
        _print_json(model_facts.as_dict(model, config, kept, plans))
    else:
        tables.show_model(model, config, kept, plans)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2, ensure_ascii=False))
