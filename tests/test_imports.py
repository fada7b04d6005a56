"""Who may import whom, and what importing the package costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rooflight

ROOT = Path(rooflight.__file__).parent
# Each room and the rooms that it may use, itself not named: the arrows of the design, followed to the end.
ARROWS = {
    "ops": set(),
    "text": set(),
    "kernels": {"ops"},
    "models": {"ops"},
    "engine": {"ops", "models", "text"},
    "limits": {"ops", "models"},
    "bench": {"ops", "models", "text", "engine", "limits"},
    "serve": {"ops", "models", "text", "engine", "limits"},
    "cli": {"ops", "models", "text", "engine", "limits", "bench", "serve", "kernels"},
}
# Modules beside the rooms are the package's face; they bring the rooms together and no room may use them.
FACE = {"__init__", "__main__"}
# What a room may take from outside: `ops` knows PyTorch alone, and text knows no PyTorch.
ONLY_TORCH = {"ops"}
WITHOUT_TORCH = {"text"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Every module named in an import anywhere in a file, those inside functions too, relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, name
            for alias in node.names:  # `from rooflight import ops` names a room too
                yield node.lineno, f"{name}.{alias.name}"
        elif isinstance(node, ast.Call) and _names_a_module(node):
            yield node.lineno, node.args[0].value  # type: ignore[attr-defined]


def _names_a_module(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return (
        name in ("import_module", "__import__")
        and bool(call.args)
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    )


def wrong_imports(source: str, path: Path) -> list[str]:
    """Imports in a file of the package that go against the arrows."""
    room = room_of(path)
    package = ["rooflight", *path.relative_to(ROOT).parent.parts]
    wrong = []
    for line, name in imported(ast.parse(source), package):
        parts = name.split(".")
        top = parts[0]
        if top == "rooflight":
            other = parts[1] if len(parts) > 1 else ""
            if other in ARROWS and room in ARROWS and other != room and other not in ARROWS[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import {name}")
        elif room in ONLY_TORCH and top != "torch" and top not in sys.stdlib_module_names:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} may import torch only, not {name}")
        elif room in WITHOUT_TORCH and top == "torch":
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import torch")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    assert wrong_imports(path.read_text(), path) == []


def test_every_room_is_known() -> None:
    """A new folder has to say what it may import before anything in it is accepted."""
    rooms = {room_of(path) for path in modules()}
    assert rooms - FACE <= set(ARROWS), f"say in ARROWS what {rooms - FACE - set(ARROWS)} may import"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/norm.py", "from rooflight.kernels import attach_all"),
        ("ops/norm.py", "def f():\n    import rooflight.models.config"),
        ("ops/norm.py", "from rooflight import engine"),
        ("ops/norm.py", "from ..kernels import providers"),
        ("ops/norm.py", "from .. import kernels"),
        ("ops/norm.py", "import importlib\nimportlib.import_module('rooflight.kernels.triton.norm')"),
        ("ops/norm.py", "import numpy"),
        ("ops/norm.py", "def f():\n    from triton import language"),
        ("text/tokenizer.py", "import torch"),
        ("text/tokenizer.py", "from rooflight.models import load"),
        ("kernels/triton/norm.py", "from rooflight.engine.runner import Runner"),
        ("models/load.py", "from rooflight import text"),
        ("engine/runner.py", "import rooflight.bench"),
        ("limits/bounds.py", "import rooflight.engine"),
        ("serve/http.py", "from rooflight.cli import main"),
    ],
)
def test_the_rule_sees_what_it_should(file: str, source: str) -> None:
    assert wrong_imports(source, ROOT / file)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/norm.py", "import math\nimport torch.nn.functional as F\nfrom rooflight.ops import checks"),
        ("kernels/triton/norm.py", "import triton\nfrom rooflight.ops.contract import REGISTRY"),
        ("engine/llm.py", "from rooflight import text\nfrom rooflight.models.load import load_model"),
        ("cli/main.py", "import typer\nfrom rooflight import engine, kernels"),
    ],
)
def test_the_rule_lets_pass_what_it_should(file: str, source: str) -> None:
    assert not wrong_imports(source, ROOT / file)


def test_import_is_light_and_touches_no_gpu() -> None:
    """Without Triton, transformers, gguf, typer and the rest, and without CUDA being initialised."""
    code = (
        "import json, sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import rooflight\n"
        "new = sorted({name.split('.')[0] for name in set(sys.modules) - before})\n"
        "print(json.dumps({'new': new, 'cuda': torch.cuda.is_initialized(), 'all': sorted(sys.modules)}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["cuda"] is False
    heavy = {
        "triton",
        "transformers",
        "gguf",
        "typer",
        "rich",
        "tokenizers",
        "huggingface_hub",
        "jinja2",
        "safetensors",
    }
    assert not heavy & {name.split(".")[0] for name in result["all"]}
    outside = set(result["new"]) - set(sys.stdlib_module_names) - {"rooflight"}
    assert not outside, f"importing rooflight also imports {outside}"
    assert not [name for name in result["all"] if name.startswith("rooflight.kernels.triton.")]


def test_importing_the_runtime_is_light_too() -> None:
    """What a start pays for before it loads anything. Jinja is for chats, gguf and the hub for models from there."""
    code = "import json, sys\nfrom rooflight import LLM\nprint(json.dumps(sorted(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "rooflight.engine.llm" in loaded
    heavy = {"triton", "torch._dynamo", "torch._inductor", "sympy", "transformers", "gguf", "jinja2", "huggingface_hub"}
    assert not heavy & loaded
    assert not [name for name in loaded if name.startswith("rooflight.kernels.triton.")]
