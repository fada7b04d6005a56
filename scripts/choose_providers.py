"""Which provider each operator takes on a measured card: kernels/choices/<gpu>.json from results/<gpu>/.

    python scripts/choose_providers.py           write the file of every card under results/
    python scripts/choose_providers.py --check   exit 1 if a file is not what the results say

The provider with the smallest geometric mean, over dtypes and shapes, of call time and of hot and cold GPU time: a
program that calls operators one by one waits for the first, one that replays a graph for the others. For operators that
`bench ops` has not measured, but scripts/step_providers.py has: over the sizes of a step, of its GPU time in a graph.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rooflight.bench.contenders import AGAIN
from rooflight.bench.rows import CALL, COLD, HOT, OpsReport

ROOT = Path(__file__).resolve().parents[1]
CHOICES = ROOT / "src/rooflight/kernels/choices"
Case = tuple[str | int, ...]  # dtype, shape and kind of time, or a step
Measured = dict[str, dict[str, dict[Case, float]]]  # operator -> provider -> logarithms


def reports(folder: Path) -> list[OpsReport]:
    """One for each operator that was measured on the card."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [OpsReport.from_data(data) for data in found if data.get("benchmark") == "ops"]


def step_report(folder: Path) -> dict[str, Any] | None:
    """What scripts/step_providers.py left there."""
    path = folder / "step_providers.json"
    return json.loads(path.read_text()) if path.exists() else None


def choices(measured: list[OpsReport], steps: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"card", "origin", "operators": {name: {"provider", "reason"}}}. At least one of the two is there."""
    found = {operator: _choice(times, "call, hot and cold") for operator, times in _contested(_by_ops(measured))}
    runs = [(report.card.name, report.environment) for report in measured[:1]]
    if steps is not None:
        runs.append((steps["environment"]["device"], steps["environment"]))
        own = [(operator, times) for operator, times in _contested(_by_steps(steps)) if operator not in found]
        found |= {operator: _choice(times, "the sizes of a step") for operator, times in own}
    if len(cards := dict(runs)) != 1:
        raise ValueError(f"choices must be of one card, were of {', '.join(cards)}")
    origin = "; ".join(f"commit {where['commit']}, {where['date']}" for _, where in runs)
    return {"card": runs[0][0], "origin": origin, "operators": dict(sorted(found.items()))}


def _by_ops(measured: list[OpsReport]) -> Measured:
    logs: Measured = defaultdict(lambda: defaultdict(dict))
    for row in (row for report in measured for row in report.rows):
        if row.contender.startswith("rooflight") and row.contender != AGAIN:
            for name in (CALL, HOT, COLD):
                if (time := row.time(name)) is not None:
                    provider = row.version.split()[-1]
                    logs[row.operator][provider][row.dtype, row.shape, name] = math.log(time.median)
    return logs


def _by_steps(steps: dict[str, Any]) -> Measured:
    logs: Measured = defaultdict(lambda: defaultdict(dict))
    for row in steps["rows"]:
        size = row["phase"], row["batch"], row["context"]
        logs[row["operator"]][row["provider"]][size] = math.log(row["us"]["median"])
    return logs


def _contested(logs: Measured) -> list[tuple[str, dict[str, dict[Case, float]]]]:
    """Where there is something to choose."""
    return [(operator, providers) for operator, providers in logs.items() if len(providers) > 1]


def _choice(providers: dict[str, dict[Case, float]], over: str) -> dict[str, str]:
    """The fastest over the cases that all of them were measured on."""
    common = set.intersection(*(set(times) for times in providers.values()))
    if not common:
        raise ValueError(f"no case was measured on all of {', '.join(providers)}")
    means = {provider: sum(times[case] for case in common) / len(common) for provider, times in providers.items()}
    best, *others = sorted(means, key=lambda provider: means[provider])
    slower = ", ".join(f"{other} takes {math.exp(means[other] - means[best]):.2f} times as long" for other in others)
    return {"provider": best, "reason": f"measured on this card: {slower} (mean of {over})"}


def main() -> int:
    stale = []
    for folder in sorted((ROOT / "results").iterdir()):
        measured, steps = reports(folder), step_report(folder)
        if not measured and steps is None:
            continue
        text = json.dumps(choices(measured, steps), indent=1) + "\n"
        path = CHOICES / f"{folder.name}.json"
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        print("not what the results say: " + ", ".join(stale) + "; run scripts/choose_providers.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
