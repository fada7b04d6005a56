"""The pages of `rooflight info`. They fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rooflight.models.sources import GET_EMBEDDED

if TYPE_CHECKING:
    import torch

    from rooflight.cli.model_facts import MemoryPlan
    from rooflight.models.config import ModelConfig


def show_machine(machine: Mapping[str, Any], providers: Mapping[str, str], operators: Mapping[str, Any]) -> None:
    """Environment, providers, operators."""
    console = Console(highlight=False)
    page = _pairs()
    page.add_row("rooflight", machine["rooflight"])
    page.add_row("Python", f"{machine['python']} on {machine['system']}")
    page.add_row("PyTorch", f"{machine['torch']}, {_cuda(machine)}")
    page.add_row("Triton", machine["triton"] or "not installed")
    page.add_row("GPU", _gpus(machine["gpus"]))
    page.add_row("CPU", _cpu(machine["cpu"]))
    page.add_row("Memory", _memory(machine["memory"]))
    page.add_row("Default model", _default_model(machine["default_model"]))
    _print(console, "This machine", page)

    page = _pairs()
    for name, line in providers.items():
        page.add_row(name, escape(line))
    _print(console, "Providers", page)
    _print(console, "Operators", _operators(providers, operators))


def show_model(model: str, config: ModelConfig, dtype: torch.dtype, plans: Sequence[MemoryPlan]) -> None:
    """What it is, its parameters, what a token costs, memory."""
    from rooflight.cli.model_facts import dtype_name

    console = Console(highlight=False)
    page = _pairs()
    page.add_row("Decoder", _decoder(config))
    page.add_row("Attention", _attention(config))
    page.add_row("Positions", _positions(config))
    head = "tied to the embedding" if config.tie_word_embeddings else "of its own"
    page.add_row("Vocabulary", f"{config.vocab_size:,} tokens, head {head}")
    _print(console, escape(model), page)
    _print(console, "Parameters", _parameters(config))

    page = _pairs()
    page.add_row("Weights read", f"{config.weight_bytes_per_token(dtype) / 1e6:,.1f} MB per token")
    page.add_row("KV cache", f"{config.kv_bytes_per_token(dtype) / 2**10:,.10g} KiB per token of context")
    _print(console, f"Decoding in {dtype_name(dtype)}", page)
    _print(console, "Memory", _plan(plans))


def size(count: int | None) -> str:
    """Bytes in MiB or GiB, as memory is counted."""
    if count is None:
        return "unknown"
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"[bold]{title}[/bold]", soft_wrap=True)
    console.print(table)
    console.print()


def _pairs() -> Table:
    """Names and values, without rules."""
    table = Table(box=None, show_header=False, padding=(0, 2), pad_edge=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _cuda(machine: Mapping[str, Any]) -> str:
    return "CPU build" if machine["cuda"] is None else f"CUDA {machine['cuda']}"


def _gpus(cards: Sequence[Mapping[str, Any]]) -> str:
    if not cards:
        return "no GPU visible"
    return "\n".join(
        f"{card['name']}, {size(card['memory_bytes'])}, capability {card['capability']}, "
        f"{card['multiprocessors']} multiprocessors"
        for card in cards
    )


def _cpu(cpu: Mapping[str, Any]) -> str:
    cores = f"{cpu['cores']} cores" if cpu["cores"] else f"{cpu['logical_cores']} logical cores"
    flags = cpu["flags"]
    bf16 = ", ".join(flag for flag in flags if "bf16" in flag)
    return "\n".join(
        (
            f"{escape(cpu['name'])}, {cores}, PyTorch uses {cpu['threads']} threads",
            f"AVX2 {_yes('avx2' in flags)}, AVX-512 {_yes('avx512f' in flags)}, BF16 {bf16 or 'no'}; "
            f"PyTorch's kernels: {cpu['torch_capability']}",
        )
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _memory(memory: Mapping[str, int | None]) -> str:
    available = memory["available_bytes"]
    return size(memory["total_bytes"]) + (f", {size(available)} available" if available is not None else "")


def _default_model(model: Mapping[str, Any] | None) -> str:
    if model is None:
        return f"none; `{GET_EMBEDDED}`"
    path = Path(model["path"])
    return f"{escape(path.name)}, {model['bytes'] / 1e6:,.1f} MB, in\n[dim]{escape(str(path.parent))}[/dim]"


def _operators(providers: Mapping[str, str], operators: Mapping[str, Any]) -> Table:
    """A mark for each provider that is there, then which one runs; the reasons below, each said once."""
    reasons = list(dict.fromkeys(reason for entry in operators.values() for reason in entry["reason"].values()))
    marks = {reason: f"({number})" if len(reasons) > 1 else "" for number, reason in enumerate(reasons, 1)}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption_justify="left")
    table.add_column("operator", overflow="fold")
    for provider in providers:
        table.add_column(provider, justify="center")
    devices = ("cpu", "cuda")
    for device in devices:
        table.add_column(f"on {device}")
    for name, entry in operators.items():
        there = ["✓" if provider in entry["providers"] else "[dim]·[/dim]" for provider in providers]
        table.add_row(name, *there, *(_active(entry, device, marks) for device in devices))
    table.caption = "\n".join(f" {mark or 'Chosen:'} {escape(reason)}" for reason, mark in marks.items())
    return table


def _active(entry: Mapping[str, Any], device: str, marks: Mapping[str, str]) -> str:
    provider = entry["active"].get(device)
    if provider is None:
        return "[dim]·[/dim]"
    text = f"{provider} {marks[entry['reason'][device]]}"
    return text if provider == "ref" else f"[green]{text}[/green]"


def _decoder(config: ModelConfig) -> str:
    return (
        f"{escape(config.family)}, {config.num_layers} layers, hidden {config.hidden_size:,}, "
        f"intermediate {config.intermediate_size:,}"
    )


def _attention(config: ModelConfig) -> str:
    text = f"{config.num_heads} query heads, {config.num_kv_heads} key-value heads, {config.head_dim} wide"
    windows = [window for window in config.sliding_windows if window]
    if windows:
        text += f"\nsliding window of {max(windows):,} tokens in {len(windows)} of {config.num_layers} layers"
    return text


def _positions(config: ModelConfig) -> str:
    rope = config.rope
    scaled = "" if rope.rope_type == "default" else f", {rope.rope_type} scaling by {rope.factor:g}"
    return f"{config.max_position_embeddings:,} tokens, RoPE with base {rope.theta:,.0f}{scaled}"


def _parameters(config: ModelConfig) -> Table:
    from rooflight.cli.model_facts import tensor_kinds

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_footer=True)
    table.add_column("tensor", footer="a layer\nall")
    table.add_column("shape", justify="right")
    table.add_column("count", justify="right")
    footer = f"{config.parameters_per_layer():,}\n{config.num_parameters():,}"
    table.add_column("parameters", justify="right", footer=footer)
    for kind in tensor_kinds(config):
        shape = " × ".join(f"{length:,}" for length in kind.shape)
        table.add_row(kind.name, shape, str(kind.count), f"{kind.parameters:,}")
    return table


def _plan(plans: Sequence[MemoryPlan]) -> Table:
    """A column for each plan."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_footer=True)
    table.add_column("sequences × context", footer="total")
    for plan in plans:
        table.add_column(f"{plan.sequences:,} × {plan.context:,}", justify="right", footer=size(plan.total))
    for name, field in (("weights", "weights"), ("RoPE table (fp32)", "rope_table"), ("KV cache", "kv")):
        table.add_row(name, *(size(getattr(plan, field)) for plan in plans))
    return table
