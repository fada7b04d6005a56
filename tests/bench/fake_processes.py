"""Processes of a run of operators without a GPU: they answer as told and write down who was asked what, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooflight.bench.cell import Case
from rooflight.limits.card import Bandwidth, Card

CARD = Card("NVIDIA Test 1", 60 * 2**20, (Bandwidth(2**31, 4.0e12),), node_us={"plain": 0.8, "dependent launch": 0.7})
TIMES = {"call_us": 10.0, "hot_us": 2.0, "cold_us": 5.0}
Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


class FakeProcesses:
    """A `start` for `ops.run`. speed: by contender a factor on its times; absent and wrong: by contender the reason.

    answers: by contender something else than the usual answer to a message, or a ChildProcessError; None for the usual.
    """

    def __init__(self, **parts: Any) -> None:
        self.speed: dict[str, float] = parts.get("speed", {})
        self.absent: dict[str, str] = parts.get("absent", {})
        self.wrong: dict[str, str] = parts.get("wrong", {})
        self.answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = parts.get("answers", {})
        self.started: list[tuple[str, ...]] = []
        self.closed: list[str] = []
        self.log: list[tuple[str, str]] = []  # (what, contender or process)

    def __call__(self, names: Sequence[str]) -> FakeProcess:
        self.started.append(tuple(names))
        return FakeProcess(self, tuple(names))

    def asked(self, what: str) -> list[str]:
        return [who for kind, who in self.log if kind == what]


class FakeProcess:
    def __init__(self, run: FakeProcesses, names: tuple[str, ...]) -> None:
        self.run, self.names = run, names
        self.here = [name for name in names if name not in run.absent]

    def receive(self) -> dict[str, Any]:
        absent = {name: reason for name, reason in self.run.absent.items() if name in self.names}
        return {"ready": self.here, "absent": absent, "device": CARD.name, "l2_bytes": CARD.l2_bytes, "memory_bytes": 1}

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        who = message.get("name", self.names[0])
        self.run.log.append((message["do"], who))
        special = self.run.answers.get(who, lambda message: None)(message)
        return self.usual(message) if special is None else special

    def usual(self, message: Mapping[str, Any]) -> dict[str, Any]:
        speed = self.run.speed.get(message.get("name", ""), 1.0)
        match message["do"]:
            case "card":
                return CARD.as_data()
            case "prepare":
                case = Case(**message["case"])
                reasons = {name: self.run.wrong.get(name) for name in message["names"]}
                traffic = 4 * case.num_tokens * case.hidden_size * 2
                versions = dict.fromkeys(message["names"], "1.0")
                facts = {"bytes": traffic, "working_set": traffic, "cold_method": "rotation of 2 sets"}
                return {**facts, "reasons": reasons, "versions": versions, "broken": False}
            case "round":
                return {name: time * speed for name, time in TIMES.items()}
            case "event_round":
                return {"event_hot_us": [29.0, 30.0, 31.0], "event_cold_us": [6.0, 7.0, 8.0]}
        return {}

    def close(self) -> None:
        self.run.closed.append(self.names[0])
