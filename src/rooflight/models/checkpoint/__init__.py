"""Where weights come from: safetensors folders, GGUF files, the hub, and seeded random values."""

from rooflight.models.checkpoint.base import Checkpoint, CheckpointError, TensorInfo

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo"]
