"""Models named `owner/name`: the files a decoder and its tokenizer need, from the Hugging Face Hub or its cache."""

from __future__ import annotations

from pathlib import Path

from rooflight.models.checkpoint.base import CheckpointError

CONFIG_FILES = ("config.json", "generation_config.json")
# `model*` leaves out duplicates of the same weights under other names (consolidated.safetensors, *.bin, GGUF).
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
# What `text.tokenizer_files` reads.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.*", "additional_chat_templates/*.jinja")


def fetch(name: str, *, weights: bool = True) -> Path:
    """Downloads what is missing (with a progress bar) and returns the folder in the cache.

    Without `weights`, only the config files. CheckpointError, one line, if the hub cannot be reached and the
    cache does not hold the model, or if the hub refuses.
    """
    import huggingface_hub  # half a second to import, and most models are local
    from huggingface_hub import errors

    patterns = [*CONFIG_FILES, *WEIGHT_FILES, *TEXT_FILES] if weights else list(CONFIG_FILES)
    local = "to use local files, pass a folder with config.json and *.safetensors, or a .gguf file"
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: its owner asks for a licence; accept it and `hf auth login`; {local}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"{name}: no such model on the Hugging Face Hub, or it is private; {local}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name}: not a model name of the form owner/name; {local}") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{name}: the Hugging Face Hub cannot be reached ({reason}); {local}") from error
    if weights and not any(folder.glob(WEIGHT_FILES[0])):  # offline, the library is content with what the cache has
        raise CheckpointError(
            f"{name}: no {WEIGHT_FILES[0]} on the Hugging Face Hub, or it cannot be reached and the cache has only the "
            f"config; {local}"
        )
    return folder
