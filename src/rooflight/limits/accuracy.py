"""How well limits foretell measured times: fitted on one model's shapes, judged on shapes that the fit never saw.

    time = overhead + bytes / (fraction * copy rate of the card)

Two figures an operator, found by least squares of relative errors on the rows whose width is the model's. They are
judged on all other rows. An operator of the step that nobody has measured is listed as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rooflight.limits.ceilings import Ceilings
from rooflight.limits.trace import Step, trace
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import on_gpu

OURS = "rooflight"  # the contender whose times are foretold
FEWEST_ROWS = 3  # of two unknowns
PROTOCOLS = ("hot_us", "cold_us")


@dataclass(frozen=True)
class Fit:
    """One operator and protocol. Errors are relative, of rows that the fit never saw; None where there are none.

    reason: why there is no fit, or "".
    """

    operator: str
    protocol: str
    fitted_rows: int = 0
    overhead_us: float | None = None
    fraction: float | None = None
    judged_rows: int = 0
    median_error: float | None = None
    worst_error: float | None = None
    reason: str = ""

    def predict_us(self, size: float, rate: float) -> float:
        assert self.overhead_us is not None
        assert self.fraction is not None
        return self.overhead_us + size / (self.fraction * rate) * 1e6


def accuracy(config: ModelConfig, card: Ceilings, folder: Path) -> list[Fit]:
    """A fit for each operator of the model's steps and of the folder's results, cold and hot.

    folder: `results/<gpu>` as `rooflight bench all` writes it. OSError or ValueError, naming what is wrong with it.
    """
    rows = _measured(folder, card)
    rate = 2 / (1 / card.read_rate(1e12) + 1 / card.write_rate)
    recipe = on_gpu(config.dtype, card.scales)
    calls = (call.operator for phase in ("decode", "prefill") for call in trace(config, Step(phase, 1, 16), recipe))
    operators = list(dict.fromkeys([*calls, *(row["operator"] for row in rows)]))
    fits = []
    for operator in operators:
        own = [row for row in rows if row["operator"] == operator]
        if not own:
            fits.append(Fit(operator, "", reason="not measured"))
            continue
        fits += [_fit(operator, protocol, own, config.hidden_size, rate) for protocol in PROTOCOLS]
    return fits


def _measured(folder: Path, card: Ceilings) -> list[dict[str, Any]]:
    """Rows of our own kernels that were timed, from every result in the folder; all must be of the card."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder}: no results here; `rooflight bench all` writes them")
    rows: list[dict[str, Any]] = []
    for path in files:
        device = ""
        try:
            data = json.loads(path.read_text())
            if data.get("benchmark") == "ops":
                device = data["environment"]["device"]
                rows += [row for row in data["rows"] if row["contender"] == OURS and row["error"] is None]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: holds no results of `rooflight bench` ({error})") from error
        if device not in ("", card.name):
            raise ValueError(f"{path}: measured on {device}, the ceilings are of {card.name}: pass its --gpu")
    return rows


def _fit(operator: str, protocol: str, rows: Sequence[Mapping[str, Any]], width: int, rate: float) -> Fit:
    points = [(row["hidden_size"], row["bytes"], row[protocol]["median"]) for row in rows if row[protocol] is not None]
    seen = [(size, time) for own, size, time in points if own == width]
    if len({size for size, _ in seen}) < FEWEST_ROWS:
        return Fit(operator, protocol, len(seen), reason=f"not measured at width {width}")
    overhead, slope = least_squares(seen)
    fit = Fit(operator, protocol, len(seen), overhead, 1e6 / (slope * rate))
    unseen = [(size, time) for own, size, time in points if own != width]
    if not unseen:
        return fit
    errors = [abs(fit.predict_us(size, rate) / time - 1) for size, time in unseen]
    return Fit(operator, protocol, len(seen), overhead, fit.fraction, len(errors), median(errors), max(errors))


def least_squares(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b), neither negative, with the smallest sum of ((a + b size) / time - 1)^2; at least two sizes differ."""
    ones = sizes = squares = times = mixed = 0.0
    for size, time in points:
        weight = 1 / time**2
        ones, sizes, squares = ones + weight, sizes + weight * size, squares + weight * size**2
        times, mixed = times + weight * time, mixed + weight * size * time
    determinant = ones * squares - sizes**2
    a, b = (squares * times - sizes * mixed) / determinant, (ones * mixed - sizes * times) / determinant
    if b <= 0:
        return times / ones, 1e-12
    return (0.0, mixed / squares) if a < 0 else (a, b)
