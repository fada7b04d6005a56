"""Which provider each operator takes on a measured card: kernels/choices/<gpu>.json from results/<gpu>/.

    python scripts/choose_providers.py           write the file of every card under results/
    python scripts/choose_providers.py --check   exit 1 if a file is not what the results say

The provider with the smallest geometric mean, over dtypes and shapes, of call time and of hot and cold GPU time: a
program that calls operators one by one waits for the first, one that replays a graph for the others.
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


def reports(folder: Path) -> list[OpsReport]:
    """One for each operator that was measured on the card."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [OpsReport.from_data(data) for data in found if data.get("benchmark") == "ops"]


def choices(measured: list[OpsReport]) -> dict[str, Any]:
    """{"card", "origin", "operators": {name: {"provider", "reason"}}}."""
    logs: dict[str, dict[str, dict[tuple[str, str, str], float]]] = defaultdict(lambda: defaultdict(dict))
    for row in (row for report in measured for row in report.rows):
        if row.contender.startswith("rooflight") and row.contender != AGAIN:
            for name in (CALL, HOT, COLD):
                if (time := row.time(name)) is not None:
                    provider = row.version.split()[-1]
                    logs[row.operator][provider][row.dtype, row.shape, name] = math.log(time.median)
    operators = {operator: _choice(providers) for operator, providers in sorted(logs.items()) if len(providers) > 1}
    environment = measured[0].environment
    origin = f"commit {environment['commit']}, {environment['date']}"
    return {"card": measured[0].card.name, "origin": origin, "operators": operators}


def _choice(providers: dict[str, dict[tuple[str, str, str], float]]) -> dict[str, str]:
    """The fastest over the cases that all of them were measured on."""
    common = set.intersection(*(set(times) for times in providers.values()))
    if not common:
        raise ValueError(f"no case was measured on all of {', '.join(providers)}")
    means = {provider: sum(times[case] for case in common) / len(common) for provider, times in providers.items()}
    best, *others = sorted(means, key=lambda provider: means[provider])
    slower = ", ".join(f"{other} takes {math.exp(means[other] - means[best]):.2f} times as long" for other in others)
    return {"provider": best, "reason": f"measured on this card: {slower} (mean of call, hot and cold)"}


def main() -> int:
    stale = []
    for folder in sorted((ROOT / "results").iterdir()):
        if not (measured := reports(folder)):
            continue
        text = json.dumps(choices(measured), indent=1) + "\n"
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
