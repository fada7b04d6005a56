"""Which provider each operator takes on a card that was measured: one JSON file a card, made from `results/`.

`scripts/choose_providers.py` writes them; a test checks that they say what the results say. On other cards the first
provider present serves, in the order of `rooflight.ops.contract.PREFERENCE`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from rooflight.kernels.driver import driver
from rooflight.ops.contract import Operator


def card_folder(name: str) -> str:
    """The name under which a card's results and choices are kept: "NVIDIA H200" is h200."""
    return "-".join(name.lower().removeprefix("nvidia ").split())


def of_card(name: str) -> dict[str, Any] | None:
    file = resources.files(__package__) / f"{card_folder(name)}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def apply(registry: Mapping[str, Operator]) -> None:
    """Take the choices for the first card that is there, where their providers are there."""
    found = driver()
    choices = of_card(found.cards[0][0]) if found and found.cards else None
    for operator, choice in (choices or {"operators": {}})["operators"].items():
        if operator in registry and choice["provider"] in registry[operator].providers:
            registry[operator].choose("cuda", choice["provider"], choice["reason"])
