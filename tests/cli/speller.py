"""A checkpoint that spells: each byte is followed by a fixed one, so that every answer is known beforehand.

The embedding is the identity, attention and MLP add nothing, and the head maps each byte to its successor:
"a" to "b" and so on to "z", after which the answer ends; "A" to "Z" go round for ever; "0" is followed by "é" (two
bytes) and the end; "!" has no finite logits. The chat template ends with a line break, followed by "a", unless its
argument `start` or a question "go on" (start "A") says otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

SPECIALS = ["<|start|>", "<|end|>"]
END = 1
VOCABULARY = len(SPECIALS) + 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONTEXT = 8192
TEMPLATE = """
{%- for message in messages %}<|start|>{{ message.role }}:{{ message.content }}<|end|>{% endfor %}<|start|>
{%- if messages[-1].content == 'go on' %}A{% elif start is defined %}{{ start if start is string else 'y' }}
{%- else %}{{ '\\n' }}{% endif %}"""


def spell(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Writes the checkpoint into `folder`; `template=None` leaves out the chat template."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(_backend().to_str(), encoding="utf-8")
    given = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def token(byte: int) -> int:
    return len(SPECIALS) + byte


def _successors() -> dict[int, int]:
    """Token to token; those that are not named are followed by the end."""
    after = dict.fromkeys(range(VOCABULARY), END)
    for first in (ord("a"), ord("A")):
        after |= {token(byte): token(byte + 1) for byte in range(first, first + 25)}
    after[token(ord("Z"))] = token(ord("A"))
    after[token(ord("\n"))] = token(ord("a"))
    lead, last = "é".encode()
    return after | {token(ord("0")): token(lead), token(lead): token(last)}


def _tensors() -> dict[str, torch.Tensor]:
    embedding = torch.eye(VOCABULARY)
    embedding[token(ord("!"))] = torch.nan
    head = torch.zeros(VOCABULARY, VOCABULARY)
    for first, second in _successors().items():
        head[second, first] = 1
    layer = {
        "input_layernorm": (VOCABULARY,),
        "post_attention_layernorm": (VOCABULARY,),
        "self_attn.q_proj": (16, VOCABULARY),
        "self_attn.k_proj": (8, VOCABULARY),
        "self_attn.v_proj": (8, VOCABULARY),
        "self_attn.o_proj": (VOCABULARY, 16),
        "mlp.gate_proj": (8, VOCABULARY),
        "mlp.up_proj": (8, VOCABULARY),
        "mlp.down_proj": (VOCABULARY, 8),
    }
    tensors = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in layer.items()}
    return tensors | {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(VOCABULARY),
        "lm_head.weight": head,
    }


def _backend() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: byte `b` has the id `token(b)`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    alphabet = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    vocabulary = {piece: index for index, piece in enumerate([*SPECIALS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIALS])
    return backend
