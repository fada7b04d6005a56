"""Collect the assembler's reports of a build into one JSON file: resources.py FOLDER CUDA_VERSION OUT.

Each kernel with its architecture, registers a thread, bytes of shared memory and of stack, and bytes spilled.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SHORTER = {"rooflight::": "", "(anonymous namespace)::": "", "__nv_bfloat16": "bf16", "__half": "fp16", "float": "fp32"}
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse(text: str) -> list[dict[str, object]]:
    kernels: list[dict[str, object]] = []
    for line in text.splitlines():
        if entry := ENTRY.search(line):
            kernels.append({"symbol": entry[1], "architecture": entry[2]})
        elif frame := FRAME.search(line):
            kernels[-1].update(zip(("stack", "spill_stores", "spill_loads"), map(int, frame.groups()), strict=True))
        elif used := USED.search(line):
            kernels[-1].update(registers=int(used[1]), shared_memory=int(used[2] or 0))
    return kernels


def readable(symbols: list[str]) -> list[str]:
    """Names as written in the source; the symbols themselves where no demangler is there."""
    if shutil.which("c++filt") is None or not symbols:
        return symbols
    done = subprocess.run(["c++filt", "-p"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    names = done.stdout
    for long, short in SHORTER.items():
        names = names.replace(long, short)
    return names.splitlines()


def main() -> None:
    folder, cuda, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    kernels = []
    for report in sorted(folder.rglob("*.ptxas")):
        for kernel in parse(report.read_text()):
            kernels.append({"source": report.name.removesuffix(".o.ptxas"), **kernel})
    for kernel, name in zip(kernels, readable([str(kernel["symbol"]) for kernel in kernels]), strict=True):
        kernel["name"] = name
        del kernel["symbol"]
    out.write_text(json.dumps({"cuda": cuda, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
