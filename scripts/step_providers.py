"""What the choices of a decode step rest on, measured on the GPU at hand.

    python scripts/step_providers.py --out FOLDER

Every provider of the step's operators goes to step_providers.json and .csv, every number of parts of decode attention
to decode_parts.json and .csv.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rooflight.bench import decode_parts, results, step_providers
from rooflight.cli.bar import bar


def main() -> int:
    parser = argparse.ArgumentParser(description="Providers and parts of a decode step, measured.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for JSON and CSV")
    parser.add_argument("--model", default="random:qwen3-0.6b", help="whose sizes are taken")
    asked = parser.parse_args()
    try:
        results.prepare(asked.out)
        with bar() as progress:
            providers = step_providers.run(asked.model, progress)
            results.write(asked.out, "step_providers", providers.as_data())
            show_providers(providers)
            parts = decode_parts.run(asked.model, progress)
            results.write(asked.out, "decode_parts", parts.as_data())
            show_parts(parts)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def show_providers(report: step_providers.ProvidersReport) -> None:
    print(f"{'operator':24} {'step':18} {'provider':8} {'us':>8} {'spread':>15} {'MB':>8} {'limit us':>8} of it")
    for row in report.rows:
        step = f"{row.phase} {row.batch} x {row.context}"
        spread = f"{row.us.low:.2f}-{row.us.high:.2f}"
        print(
            f"{row.operator:24} {step:18} {row.provider:8} {row.us.median:8.2f} {spread:>15} {row.bytes / 1e6:8.2f} "
            f"{row.limit_us:8.2f} {row.limit_us / row.us.median:5.0%}"
        )
    for name, why in report.missing.items():
        print(f"{name}: {why}")


def show_parts(report: decode_parts.PartsReport) -> None:
    numbers = decode_parts.PARTS
    print("batch context rule best   loss  by rule" + "".join(f"{f'{number} parts':>10}" for number in numbers))
    for row in report.rows:
        times = "".join(f"{row.us[str(number)].median:10.2f}" for number in numbers)
        by_rule = row.us[str(decode_parts.BY_RULE)].median
        print(f"{row.batch:5} {row.context:7} {row.rule:4} {row.best:4} {row.loss:6.1%} {by_rule:8.2f}{times}")


if __name__ == "__main__":
    sys.exit(main())
