"""A preset as a folder of files, so that a start reads its weights as it reads a user's.

Drawing the values of `random:<preset>` takes the CPU longer than all else that a start does, and no user waits for it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from rooflight.bench.peers.hf_config import write_folder
from rooflight.models.checkpoint.random_weights import RandomCheckpoint, preset
from rooflight.models.weights import hf_targets


def write_preset(name: str, folder: Path) -> Path:
    """config.json and model.safetensors, in the preset's dtype and under Hugging Face names; returns the folder.

    All of it is in memory for a moment. ValueError for a model that such a config cannot describe.
    """
    config = preset(name)
    write_folder(config, config.dtype, folder)
    shapes = {tensor: target.shape for tensor, target in hf_targets(config).items()}
    drawn = RandomCheckpoint(name, config, shapes)
    tensors = {tensor: torch.empty(shape, dtype=config.dtype) for tensor, shape in shapes.items()}
    for tensor, out in tensors.items():
        drawn.read_into(tensor, out)
    save_file(tensors, folder / "model.safetensors")
    return folder
