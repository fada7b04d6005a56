"""From a name to a running decoder: the one place that joins sources, configs, checkpoints and weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooflight.models.checkpoint import hub
from rooflight.models.checkpoint.base import Checkpoint, CheckpointError, stored_dtype
from rooflight.models.checkpoint.random_weights import RandomCheckpoint, preset
from rooflight.models.checkpoint.safetensors_files import SafetensorsCheckpoint
from rooflight.models.communicator import Communicator
from rooflight.models.config import ModelConfig
from rooflight.models.decoder import Decoder
from rooflight.models.device import check_device, refusing
from rooflight.models.hf_config import config_dtype, from_hf_config
from rooflight.models.sources import Kind, resolve
from rooflight.models.weights import (
    Progress,
    Target,
    check_tensors,
    gguf_targets,
    head_differs,
    hf_ignored,
    hf_targets,
    load_weights,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TokenizerFiles = Path | Mapping[str, Any] | None


@dataclass(frozen=True)
class LoadedModel:
    """`config.dtype` is the dtype of the loaded weights. `source` is where they came from, resolved.

    `tokenizer_files`: the folder with tokenizer.json, or a GGUF file's metadata, or None (random weights).
    """

    decoder: Decoder
    config: ModelConfig
    source: str
    tokenizer_files: TokenizerFiles


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that is ready to be read. `quantised`: its values have no dtype of their own to keep."""

    config: ModelConfig
    checkpoint: Checkpoint
    targets: Mapping[str, Target]
    ignored: Callable[[str], bool]
    tokenizer_files: TokenizerFiles
    quantised: bool = False


def load_config(source: str | Path | None) -> ModelConfig:
    """The config alone: no weights are read or allocated. `source` as in `load_model`.

    Takes milliseconds for presets and local files; from the hub only the config files are fetched. Where a folder's
    config names no dtype, the headers of its weights decide. CheckpointError as in `load_model`.
    """
    found = resolve(source)
    if found.kind is Kind.RANDOM:
        return preset(found.name)
    if found.kind is Kind.GGUF:
        return _open_gguf(found.path).config
    return _folder_config(hub.fetch(found.name, weights=False) if found.kind is Kind.HUB else found.path)


def load_model(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    communicator: Communicator | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Reads a model into packed parameters on `device`, tensor by tensor.

    source: a folder with config.json and safetensors; a .gguf file; a hub name; `random:<preset>`; None for the
        embedded default.
    dtype: "fp32", "bf16", "fp16" or a floating torch.dtype; "auto" is the model's own, and for quantised files
        FP32 on the CPU and BF16 elsewhere.
    progress: called with (bytes read, bytes in all) after each tensor.

    ValueError for an unknown dtype or device, before anything is opened, and for weights that do not fit into the
    device's memory; CheckpointError (a ValueError), naming file and tensor, for anything wrong with the model's files.
    """
    wanted, place = _check_dtype(dtype), check_device(device)
    found = resolve(source)
    if found.kind is Kind.RANDOM:
        opened = _open_random(found.name)
    elif found.kind is Kind.GGUF:
        opened = _open_gguf(found.path)
    else:
        opened = _open_folder(hub.fetch(found.name) if found.kind is Kind.HUB else found.path)
    if wanted is None:
        wanted = opened.config.dtype
        if opened.quantised and place.type != "cpu":
            wanted = torch.bfloat16
    check_tensors(opened.checkpoint, opened.targets, opened.ignored)  # before memory is taken
    config = replace(opened.config, dtype=wanted)
    with refusing(_too_large(config, place)):
        decoder = Decoder(config, communicator, device=place)
        load_weights(dict(decoder.named_parameters()), opened.checkpoint, opened.targets, progress)
    return LoadedModel(decoder.eval(), config, found.name, opened.tokenizer_files)


def _check_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    if dtype == "auto":
        return None
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype must be auto, {', '.join(DTYPES)} or a floating torch.dtype, was {dtype!r}")


def _too_large(config: ModelConfig, place: torch.device) -> str:
    need = config.num_parameters() * config.dtype.itemsize
    room = f", where {torch.cuda.mem_get_info(place)[0] / 1e9:.2f} GB were free" if place.type == "cuda" else ""
    return f"model must be smaller, or its dtype: {need / 1e9:.2f} GB of weights do not fit on {place}{room}"


def _open_random(name: str) -> _Opened:
    config = preset(name)
    targets = hf_targets(config)
    checkpoint = RandomCheckpoint(name, config, {tensor: target.shape for tensor, target in targets.items()})
    return _Opened(config, checkpoint, targets, _none, None)


def _open_folder(folder: Path) -> _Opened:
    config_path = folder / "config.json"
    if not config_path.is_file() and (ggufs := sorted(folder.glob("*.gguf"))):
        raise CheckpointError(f"{folder}: no config.json; for GGUF, pass the file itself, such as {ggufs[0]}")
    config, checkpoint = _folder_config(folder), SafetensorsCheckpoint(folder)
    if head_differs(checkpoint, config):
        warnings.warn(
            f"{config_path}: tie_word_embeddings is true, but lm_head.weight is there and differs from the "
            "embedding; it is used as the head",
            stacklevel=3,
        )
        config = replace(config, tie_word_embeddings=False)
    return _Opened(config, checkpoint, hf_targets(config), hf_ignored(config), folder)


def _open_gguf(path: Path) -> _Opened:
    from rooflight.models.checkpoint.gguf_file import GgufFile  # 0.2 s to import, for this kind only
    from rooflight.models.gguf_config import ROPE_FREQS, from_gguf

    file = GgufFile(path)
    own_dtype = stored_dtype(file.tensors)
    rope_freqs = tuple(file.values(ROPE_FREQS)) if ROPE_FREQS in file.tensors else ()
    shapes = {name: info.shape for name, info in file.tensors.items()}
    try:
        config = from_gguf(file.metadata(), shapes, dtype=own_dtype or torch.float32, rope_freqs=rope_freqs)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return _Opened(config, file, gguf_targets(config), ROPE_FREQS.__eq__, file.metadata(), quantised=own_dtype is None)


def _folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    config = _read_json(path)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    try:
        file_dtype = None
        if config_dtype(config) is None and any(folder.glob("*.safetensors")):
            file_dtype = stored_dtype(SafetensorsCheckpoint(folder).tensors)
        return from_hf_config(config, generation, file_dtype=file_dtype)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


def _none(name: str) -> bool:
    return False
