"""Does the harness measure what it says? `rooflight bench self-test`.

A copy runs at the ceiling that a copy set; a contender against itself is a tie; a kernel slowed by a known 5 % reads
5 %; after a flush loads come from DRAM. That cold bytes are DRAM bytes, hardware counters must say, in
`scripts/counters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rooflight.bench import card, contenders
from rooflight.bench.cell import Bind, Case, Cell
from rooflight.bench.device import Closure, CudaDevice, Device
from rooflight.bench.measurement import Spread
from rooflight.bench.rows import CALL
from rooflight.bench.timing import ColdPlan, Timer
from rooflight.limits.card import Card

ROUNDS = 7
NEAR_CEILING = 0.03
COPY_BYTES = card.QUICK_COPIES[0]
CASE = Case("fused_add_rms_norm", "bf16", 256, 4096)
SLOWER, SLOWER_BY = 1.05, 0.01
EVICTED = 1.8  # DRAM answers that much later than L2, at least
TIE = 0.03  # of GPU times; a host is noisier
SLEEP_CYCLES = 200_000  # about 100 us


@dataclass(frozen=True)
class Verdict:
    """One check: what was expected and found, in words."""

    name: str
    passed: bool
    detail: str


def duel(rounds_of: Sequence[Callable[[], Mapping[str, float]]], rounds: int = ROUNDS) -> list[dict[str, Spread]]:
    """Rounds of several contenders in one process, in alternating order; the spreads of each."""
    times: list[dict[str, list[float]]] = [{} for _ in rounds_of]
    order = list(range(len(rounds_of)))
    for turn in range(rounds):
        for index in order if turn % 2 == 0 else order[::-1]:
            for name, value in rounds_of[index]().items():
                times[index].setdefault(name, []).append(value)
    return [{name: Spread.of(values) for name, values in its.items()} for its in times]


def copy_at_ceiling(device: Device, measured: Card, size: int = COPY_BYTES) -> Verdict:
    """A copy, timed as an operator is, against the copy bandwidth of the card."""
    copy = card.COPY_METHODS[measured.methods["copy"]]
    closures = [partial(copy, *pair) for pair in card.copy_pairs(device, size)]
    for closure in closures:
        closure()
    timer = Timer(device, ColdPlan.of(2 * size, device.l2_bytes), closures, refresh=lambda: None)
    cold = duel([timer.round])[0]["cold_us"]
    share = 2 * size / cold.median * 1e6 / measured.copy_bandwidth
    detail = f"a copy runs at {share:.1%} of the copy ceiling, {measured.copy_bandwidth / 1e12:.2f} TB/s"
    return Verdict("copy", abs(share - 1) <= NEAR_CEILING, detail)


def itself_is_a_tie(device: Device, case: Case = CASE, bind: Bind = contenders.bind) -> Verdict:
    """Ours against ours: 1 must lie in the spread of the ratio, for every time."""
    cell = Cell(case, device, bind)
    names = contenders.OURS, contenders.AGAIN
    reasons = [reason for reason in cell.prepare(names).values() if reason]
    if reasons:
        return Verdict("A against A", False, f"{case}: {reasons[0]}")
    ours, again = duel([partial(cell.round, name) for name in names])
    cell.close()
    parts, passed = [], True
    for name, time in ours.items():
        other = again[name]
        low, high = other.low / time.high, other.high / time.low
        near = name == CALL or abs(other.median / time.median - 1) <= TIE
        passed = passed and low <= 1 <= high and near
        parts.append(f"{name.removesuffix('_us')} {other.median / time.median:.3f} ({low:.3f} to {high:.3f})")
    return Verdict("A against A", passed, f"{case}: " + ", ".join(parts))


def slowed_reads_slower(device: Device, sleep: Callable[[int], Closure] | None = None) -> Verdict:
    """A kernel that spins for 5 % more cycles must take 5 % longer, hot and cold."""
    sleep = sleep or (lambda cycles: partial(torch.cuda._sleep, cycles))
    closures = [sleep(SLEEP_CYCLES), sleep(round(SLOWER * SLEEP_CYCLES))]
    for closure in closures:
        closure()
    timers = [Timer(device, ColdPlan(1), [closure], refresh=lambda: None) for closure in closures]
    plain, slowed = duel([timer.round for timer in timers])
    found = {name: slowed[name].median / plain[name].median for name in ("hot_us", "cold_us")}
    detail = ", ".join(f"{name.removesuffix('_us')} {value - 1:+.1%}" for name, value in found.items())
    passed = all(abs(value - SLOWER) <= SLOWER_BY for value in found.values())
    return Verdict("slowed by 5 %", passed, detail)


def flush_evicts(device: CudaDevice) -> Verdict:
    """Loads that wait for each other take much longer after a flush: what they load has left the cache."""
    latency = card.latency_ns(device)
    if not latency:
        return Verdict("flush", False, "the bench library is not built (make kernels), so nothing can tell")
    ratio = latency["DRAM"] / latency["L2"]
    detail = f"a dependent load takes {latency['L2']:.0f} ns, after a flush {latency['DRAM']:.0f} ns"
    return Verdict("flush", ratio >= EVICTED, detail)


def run(progress: Callable[[str], None] = lambda what: None) -> list[Verdict]:
    """All checks on the current GPU; ValueError without one."""
    device = CudaDevice()
    with torch.inference_mode():
        progress("ceilings of the card")
        measured = card.measure(device, full=False)
        verdicts = []
        for what, check in (
            ("a copy at its ceiling", partial(copy_at_ceiling, device, measured)),
            ("a contender against itself", partial(itself_is_a_tie, device)),
            ("a kernel slowed by 5 %", partial(slowed_reads_slower, device)),
            ("a flush of the cache", partial(flush_evicts, device)),
        ):
            progress(what)
            verdicts.append(check())
        return verdicts
