"""Compiler launcher: runs a command and keeps what the assembler said (`-Xptxas -v`) beside the object it made.

keep_report.py nvcc ... -o some.o    also writes some.o.ptxas; warnings and errors still go to standard error
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    command = sys.argv[1:]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    report = [line for line in done.stderr.splitlines() if "ptxas info" in line or "bytes stack frame" in line]
    rest = [line for line in done.stderr.splitlines() if line not in report]
    if rest:
        print("\n".join(rest), file=sys.stderr)
    if done.returncode == 0 and "-o" in command:
        target = Path(command[command.index("-o") + 1])
        target.with_name(target.name + ".ptxas").write_text("\n".join(report) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
