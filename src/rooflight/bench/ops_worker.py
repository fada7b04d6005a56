"""Contenders for operators in a process of their own: `python -m rooflight.bench.ops_worker NAME...`.

Ready: {"ready": names, "absent": {name: reason}, "device", "l2_bytes", "memory_bytes"}. Then, one answer a line:

    {"do": "card", "full": bool}             the card's ceilings
    {"do": "warm", "case": {...}}            call every contender once, so that whatever compiles does so now
    {"do": "prepare", "case": {...}, "names": [...]}
                                             facts of the case; by name the version and the reason against timing it
    {"do": "round", "name": n}               microseconds call, hot, cold
    {"do": "event_round", "name": n}         microseconds of samples of the event protocol, hot and cold
    {"do": "release"}                        free the case's memory

An answer may be {"error": why, "broken": bool}; a broken process can measure nothing more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch

from rooflight.bench import contenders
from rooflight.bench.card import measure
from rooflight.bench.cell import Case, Cell, call_once, one_line
from rooflight.bench.channel import Answer, Message, serve
from rooflight.bench.device import CudaDevice

KEPT_BYTES = 2**30  # of freed memory that a process may hold on to; its neighbours need some too


class OpsWorker:
    """Answers the messages above."""

    def __init__(self, names: Sequence[str]) -> None:
        self.device = CudaDevice()
        self.absent = {name: reason for name in names if (reason := contenders.missing(name)) is not None}
        self.names = [name for name in names if name not in self.absent]
        self.cell: Cell | None = None

    def ready(self) -> Message:
        card = torch.cuda.get_device_properties()
        facts = {"l2_bytes": self.device.l2_bytes, "memory_bytes": card.total_memory, "device": card.name}
        return {"ready": self.names, "absent": self.absent, **facts}

    def answer(self, message: Message) -> Message:
        try:
            return self._answer(message)
        except Exception as error:
            return {"error": one_line(error), "broken": not self.device.healthy()}

    def _answer(self, message: Message) -> Message:
        match message["do"]:
            case "card":
                return measure(self.device, full=message["full"]).as_data()
            case "warm":
                call_once(Case(**message["case"]), self.device, self.names)
                self._release()
                return {}
            case "prepare":
                return self._prepare(Case(**message["case"]), message["names"])
            case "round":
                return dict(self._current().round(message["name"]))
            case "event_round":
                return dict(self._current().event_round(message["name"]))
            case "release":
                self._release()
                return {}
        raise ValueError(f"do must be one of those above, was {message['do']!r}")

    def _prepare(self, case: Case, names: Sequence[str]) -> Message:
        self.cell = Cell(case, self.device)
        reasons = self.cell.prepare(names)
        if self.cell.working_set > KEPT_BYTES // 4:
            torch.cuda.empty_cache()  # what the check needed
        versions = {name: contenders.version(name, case.operator) for name in names}
        broken = any(reasons.values()) and not self.device.healthy()
        return {**self.cell.facts(), "reasons": reasons, "versions": versions, "broken": broken}

    def _current(self) -> Cell:
        if self.cell is None:
            raise ValueError("prepare comes first")
        return self.cell

    def _release(self) -> None:
        if self.cell is not None:
            self.cell.close()
        self.cell = None
        if torch.cuda.memory_reserved() > KEPT_BYTES:
            gc.collect()
            torch.cuda.empty_cache()


def main(names: list[str]) -> None:
    def start() -> tuple[Message, Answer]:
        worker = OpsWorker(names)
        return worker.ready(), worker.answer

    with torch.inference_mode():
        serve(start)


if __name__ == "__main__":
    main(sys.argv[1:])
