"""`rooflight kernels`: what each compiled kernel takes of a multiprocessor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from rooflight.cli.console import wide_console
from rooflight.kernels import library

EPILOG = """[bold]Examples[/bold]

rooflight kernels

rooflight kernels --match backward --all

rooflight kernels --json"""
BLOCKS, SOME_BLOCKS = (128, 256, 512, 1024), (256, 1024)  # threads a block, for the occupancy
FIGURES: dict[str, Callable[[library.Kernel], int]] = {
    "regs": lambda kernel: kernel.registers,
    "smem": lambda kernel: kernel.shared_memory,
    "stack": lambda kernel: kernel.stack,
    "spills": lambda kernel: kernel.spill_stores + kernel.spill_loads,
}


def kernels(
    match: Annotated[str, typer.Option(metavar="TEXT", help="Only kernels with TEXT in their name.")] = "",
    every: Annotated[bool, typer.Option("--all", help="A line for each instance of a template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array of all instances instead.")] = False,
) -> None:
    """Show registers, shared memory, stack, spills and theoretical occupancy of the compiled kernels."""
    if not library.kernels():
        raise ValueError("no compiled kernels: `make kernels` builds them (it needs nvcc)")
    found = [kernel for kernel in library.kernels() if match in kernel.name]
    if not found:
        raise ValueError(f"match must be a part of a kernel's name, was {match!r}")
    if as_json:
        rows = [{**asdict(k), "occupancy": {str(t): k.occupancy(t) for t in BLOCKS}} for k in found]
        print(json.dumps(rows, indent=1))
        return
    console = wide_console()
    console.print(_instances(found) if every else _templates(found))
    spilling = sum(bool(kernel.spill_stores or kernel.spill_loads) for kernel in found)
    state = library.load() or "loaded"
    architectures = ", ".join(sorted({kernel.architecture for kernel in found}))
    line = f"{len(found)} kernels for {architectures}, {spilling} with spills. Library: {state}."
    console.print(line, soft_wrap=True)


def _templates(found: list[library.Kernel]) -> Table:
    """A line for each template: least to most over its instances."""
    groups: dict[str, list[library.Kernel]] = {}
    for kernel in found:
        groups.setdefault(kernel.name.partition("<")[0], []).append(kernel)
    table = _table(SOME_BLOCKS, "n")
    for name, its in groups.items():
        shares = [_range([kernel.occupancy(threads) or 0 for kernel in its], percent=True) for threads in SOME_BLOCKS]
        figures = [_range([figure(kernel) for kernel in its]) for figure in FIGURES.values()]
        table.add_row(name, str(len(its)), *figures, " ".join(shares))
    return table


def _instances(found: list[library.Kernel]) -> Table:
    """Template arguments: data, weights, elements a pack, packs a thread, with a residual."""
    table = _table(BLOCKS, "arch")
    for kernel in found:
        shares = [_range([kernel.occupancy(threads) or 0], percent=True) for threads in BLOCKS]
        figures = [str(figure(kernel)) for figure in FIGURES.values()]
        table.add_row(kernel.name, kernel.architecture.removeprefix("sm_"), *figures, " ".join(shares))
    return table


def _table(blocks: Sequence[int], *more: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption_justify="left")
    table.add_column("kernel", overflow="fold", min_width=21)
    for column in (*more, *FIGURES, "occupancy"):
        table.add_column(column, justify="right", no_wrap=True)
    table.caption = (
        "n: instances; regs: registers of a thread; smem: bytes of shared memory a block;\n"
        "stack, spills: bytes a thread. occupancy: % of the warps that fit at once, in\n"
        f"blocks of {', '.join(map(str, blocks))} threads; 0: none fits."
    )
    return table


def _range(values: Sequence[float], percent: bool = False) -> str:
    """Least to most, one figure where they are the same."""
    low, high = (round(100 * value) if percent else round(value) for value in (min(values), max(values)))
    return str(low) if low == high else f"{low}-{high}"
