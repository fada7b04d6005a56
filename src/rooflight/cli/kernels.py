"""`rooflight kernels`: what each compiled kernel takes of a multiprocessor."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rooflight.kernels import library

EPILOG = """[bold]Examples[/bold]

rooflight kernels

rooflight kernels --match backward

rooflight kernels --json"""
BLOCKS = (128, 256, 512, 1024)  # threads a block, for the occupancy


def kernels(
    match: Annotated[str, typer.Option(metavar="TEXT", help="Only kernels with TEXT in their name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead.")] = False,
) -> None:
    """Show registers, shared memory, stack, spills and theoretical occupancy of the compiled kernels."""
    found = [kernel for kernel in library.kernels() if match in kernel.name]
    if not library.kernels():
        raise ValueError("no compiled kernels: `make kernels` builds them (it needs nvcc)")
    if as_json:
        rows = [{**asdict(k), "occupancy": {str(t): k.occupancy(t) for t in BLOCKS}} for k in found]
        print(json.dumps(rows, indent=1))
        return
    console = Console(highlight=False)
    console.print(_table(found))
    spilling = sum(bool(kernel.spill_stores or kernel.spill_loads) for kernel in found)
    state = library.load() or "loaded"
    console.print(f"{len(found)} kernels, {spilling} with spills. Library: {state}.", soft_wrap=True)


def _table(found: list[library.Kernel]) -> Table:
    """Template arguments: data, weights, elements a pack, packs a thread, with a residual."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption_justify="left")
    table.add_column("kernel", overflow="fold")
    for column in ("arch", "regs", "smem", "stack", "spills", "occupancy"):
        table.add_column(column, justify="right", no_wrap=True)
    for kernel in found:
        shares = [kernel.occupancy(threads) for threads in BLOCKS]
        table.add_row(
            kernel.name,
            kernel.architecture.removeprefix("sm_"),
            str(kernel.registers),
            f"{kernel.shared_memory:,}",
            str(kernel.stack),
            str(kernel.spill_stores + kernel.spill_loads),
            " ".join("-" if share is None else f"{share:.0%}".rstrip("%") for share in shares),
        )
    table.caption = (
        "regs: registers of a thread; smem: bytes of shared memory a block; stack and spills: bytes a\n"
        f"thread. occupancy: % of the warps that fit at once, in blocks of {', '.join(map(str, BLOCKS))} threads."
    )
    return table
