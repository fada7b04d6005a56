"""`rooflight bench ops`: operators, ours and peers, each figure next to the limit of the card.

Contenders sit in processes of their own: ours and eager PyTorch in one, every third-party peer in one, compiled
PyTorch in several, since compiling takes longest and can be done side by side. First everything is compiled. Then, case
by case, all processes prepare (check, capture) together, and take turns in alternating order, one at a time, while the
others wait. This process keeps the GPU untouched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime, timezone
from threading import Lock
from typing import Any

import torch

from rooflight.bench import contenders
from rooflight.bench.cell import NO_SUCH_OPERATOR, Case
from rooflight.bench.crew import Crew, Start, crews, start_process
from rooflight.bench.environment import describe, describe_gpu
from rooflight.bench.ops_setup import OpsSetup
from rooflight.bench.rows import OpRow, OpsReport, make_row
from rooflight.bench.timing import EVENT_ROUNDS
from rooflight.limits.card import Card

Progress = Callable[[str, int, int], None]


def run(
    setup: OpsSetup,
    progress: Progress = lambda *_: None,
    finished: Callable[[OpsReport], None] = lambda report: None,
    full_card: bool = False,
    start: Start = start_process,
) -> OpsReport:
    """Measure everything in the setup; `progress` gets (what, done, of).

    The card's ceilings are measured first: those that limits need, or all. `finished` gets the rows of each operator as
    soon as they are complete: a run that ends early keeps them. ValueError if no contender can run here.
    """
    environment = {**describe(torch.get_num_threads()), **describe_gpu()}
    cases = setup.cases()
    names = contenders.chosen(setup.contenders)
    begun = time.perf_counter()
    with ExitStack() as stack:
        progress("starting", 0, len(cases))
        crew = [stack.enter_context(member) for member in crews(names, len(cases), start)]
        for member in crew:
            member.wait()
        absent = {name: reason for member in crew for name, reason in member.absent.items()}
        crew = [member for member in crew if member.names]
        if not crew:
            raise ValueError("none of the contenders can run here: " + _list(absent))
        progress("ceilings of the card", 0, len(cases))
        card = Card.from_data(crew[0].ask({"do": "card", "full": full_card}))
        _warm(crew, cases, progress)
        prepared = time.perf_counter() - begun
        run_id = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ-") + f"{os.getpid()}"
        match = _Match(setup, run_id, card, crew)
        rows: list[OpRow] = []

        def report() -> OpsReport:
            seconds = {"seconds_to_prepare": round(prepared, 1), "seconds": round(time.perf_counter() - begun, 1)}
            about = {**environment, "l2_bytes": card.l2_bytes, **seconds}
            its_card = replace(card, environment=about)
            return OpsReport(run_id, asdict(setup), about, its_card, tuple(rows), {**absent, **match.absent})

        for index, case in enumerate(cases):
            progress(str(case), index, len(cases))
            rows += match.measure(index, case)
            if index + 1 == len(cases) or cases[index + 1].operator != case.operator:
                finished(report().of(case.operator))
    progress("done", len(cases), len(cases))
    return report()


def measure_card(start: Start = start_process) -> Card:
    """All ceilings of the GPU, in a process of its own, with the environment."""
    environment = {**describe(torch.get_num_threads()), **describe_gpu()}
    with Crew([contenders.OURS], start) as member:
        member.wait()
        return replace(Card.from_data(member.ask({"do": "card", "full": True})), environment=environment)


def _list(absent: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in absent.items())


def _warm(crew: Sequence[Crew], cases: Sequence[Case], progress: Progress) -> None:
    """Let every process call everything once, all at the same time: compilers are slow and nothing is timed yet."""
    done, lock = 0, Lock()
    total = sum(member.serves(index) for member in crew for index in range(len(cases)))

    def warm(member: Crew) -> None:
        nonlocal done
        for index, case in enumerate(cases):
            if member.serves(index) and member.alive:
                member.try_ask({"do": "warm", "case": asdict(case)})
                with lock:
                    done += 1
                    progress("compiling", done, total)

    with ThreadPoolExecutor(len(crew)) as pool:
        list(pool.map(warm, crew))


class _Match:
    """The contenders of one run, case by case."""

    def __init__(self, setup: OpsSetup, run_id: str, card: Card, crew: Sequence[Crew]) -> None:
        self.setup, self.run_id, self.card, self.crew = setup, run_id, card, crew
        self.absent: dict[str, str] = {}

    def measure(self, index: int, case: Case) -> list[OpRow]:
        """Prepare together, take turns, release. Rows in the order of the contenders' names."""
        serving = [member for member in self.crew if member.serves(index)]
        if not serving:
            self.absent[str(case)] = "the process for it could not start"
            return []
        with ThreadPoolExecutor(len(serving)) as pool:
            facts = dict(pair for found in pool.map(lambda m: _prepare(m, case, self.setup), serving) for pair in found)
            errors = {name: fact["reason"] for name, fact in facts.items()}
            times: dict[str, dict[str, list[float]]] = {name: {} for name in facts}
            if self.setup.protocol != "event":
                self._take_turns("round", self.setup.rounds, serving, errors, times)
            if self.setup.protocol != "graph":
                self._take_turns("event_round", EVENT_ROUNDS, serving, errors, times)
            list(pool.map(_release, serving))
        known = next((fact for fact in facts.values() if "bytes" in fact), None)
        if known is None:
            self.absent[str(case)] = _list(errors)
            return []
        rows = []
        for name in (name for name in contenders.NAMES if name in facts):
            if errors[name] == NO_SUCH_OPERATOR:
                self.absent[f"{name} {case.operator} {case.dtype}"] = NO_SUCH_OPERATOR
                continue
            about = {**known, **facts[name]}  # each process says itself how it emptied the cache
            rows.append(make_row(self.run_id, case, self.card, name, about, times[name], errors[name]))
        return rows

    def _take_turns(
        self,
        what: str,
        rounds: int,
        serving: Sequence[Crew],
        errors: dict[str, str | None],
        times: Mapping[str, dict[str, list[float]]],
    ) -> None:
        """One contender at a time, in alternating order. A failure ends a contender's case, or its process's."""
        order = [(member, name) for member in serving for name in member.names if name in errors]
        for turn in range(rounds):
            for member, name in order if turn % 2 == 0 else order[::-1]:
                if errors[name] is not None:
                    continue
                reply = member.try_ask({"do": what, "name": name})
                if "error" in reply:
                    errors[name] = reply["error"]
                    lost = [other for other in member.names if errors.get(other, "") is None] if reply["broken"] else []
                    errors.update(dict.fromkeys(lost, f"lost with {name}, which failed in the same process"))
                    continue
                for time_name, value in reply.items():
                    times[name].setdefault(time_name, []).extend(value if isinstance(value, list) else [value])


def _release(member: Crew) -> None:
    if member.alive:
        member.try_ask({"do": "release"})


def _prepare(member: Crew, case: Case, setup: OpsSetup) -> list[tuple[str, dict[str, Any]]]:
    """Of each of a process's contenders version, reason against timing it, and what the case moves."""
    asked = setup.contenders
    names = [name for name in member.names if name in asked or not contenders.is_default(name, case.operator)]
    reply = member.try_ask({"do": "prepare", "case": asdict(case), "names": names})
    if "error" in reply:
        return [(name, {"version": "", "reason": reply["error"]}) for name in names]
    common = {key: reply[key] for key in ("bytes", "cold_method")}
    reasons = reply["reasons"]
    if reply["broken"]:
        reasons = {
            name: reasons[name] or "lost with another contender, which failed in the same process" for name in names
        }
    return [(name, {**common, "version": reply["versions"][name], "reason": reasons[name]}) for name in names]
