"""Checkpoint files to weights to decoder. `load_model` and `load_config` are the ways in."""

from rooflight.models.checkpoint.base import CheckpointError
from rooflight.models.communicator import Communicator, SingleRank
from rooflight.models.config import ModelConfig, RopeConfig
from rooflight.models.decoder import Decoder
from rooflight.models.load import LoadedModel, load_config, load_model
from rooflight.models.rope_table import rope_table

__all__ = [
    "CheckpointError",
    "Communicator",
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "RopeConfig",
    "SingleRank",
    "load_config",
    "load_model",
    "rope_table",
]
