"""What a run of operators measures, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rooflight.bench import contenders
from rooflight.bench.cell import DTYPES, Case
from rooflight.ops.contract import REGISTRY

PROTOCOLS = ("graph", "event", "both")
OPERATORS = (
    "rms_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "rms_norm_backward",
    "layer_norm",
    "fused_add_layer_norm",
    "layer_norm_backward",
)
# By default, since time is short: these get every workload, the others SHORT_GRID; and these every dtype, others one.
WHOLE_GRID = ("rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_")
EVERY_DTYPE = ("rms_norm", "fused_add_rms_norm")
SHORT_GRID = ((1, 4096), (256, 4096), (16384, 4096))
FEWEST_ROUNDS = 7


@dataclass(frozen=True)
class OpsSetup:
    """What is measured. Empty operators, shapes or contenders mean the defaults; shapes are (tokens, width).

    whole_grid: every workload and dtype of every operator; by default some get fewer (WHOLE_GRID, EVERY_DTYPE). Fewer
    than seven rounds are for trying things out.
    """

    operators: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    shapes: tuple[tuple[int, int], ...] = ()
    contenders: tuple[str, ...] = ()
    rounds: int = FEWEST_ROUNDS
    protocol: str = "both"
    whole_grid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, was {self.rounds}")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, was {self.protocol!r}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, was {dtype!r}")
        for operator in self.operators:
            if operator not in benchmarked():
                raise ValueError(f"operator must be one of {', '.join(benchmarked())}, was {operator!r}")
        for tokens, width in self.shapes:
            if tokens < 1 or width < 1:
                raise ValueError(f"shape must be TOKENSxWIDTH, both 1 or more, was {tokens}x{width}")
        contenders.chosen(self.contenders)

    def cases(self) -> list[Case]:
        """In the order they are measured, each once."""
        found = [
            Case(operator, dtype, tokens, width, self.seed)
            for operator in self.operators or benchmarked()
            for dtype in self._dtypes(operator)
            for tokens, width in self._shapes(operator)
        ]
        return list(dict.fromkeys(found))

    def _dtypes(self, operator: str) -> tuple[str, ...]:
        everything = self.operators or self.shapes or self.whole_grid or operator in EVERY_DTYPE
        return self.dtypes if everything else self.dtypes[:1]

    def _shapes(self, operator: str) -> Iterable[tuple[int, int]]:
        if self.shapes:
            return self.shapes
        workloads = REGISTRY[operator].workloads.values()
        grid = [(dims["num_tokens"], dims["hidden_size"]) for dims in workloads]
        if self.whole_grid or operator in WHOLE_GRID:
            return grid
        return [shape for shape in SHORT_GRID if shape in grid] or grid


def benchmarked() -> tuple[str, ...]:
    """The operators of this harness that this installation has."""
    return tuple(name for name in OPERATORS if name in REGISTRY)
