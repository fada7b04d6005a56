"""What a tokenizer is made of, whichever kind of file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers

# Files often state one end token although the model was trained to end a turn with another. These
# names are used for nothing else; they count where the file has them as special or added tokens.
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
)


@dataclass(frozen=True)
class Vocabulary:
    """A loaded vocabulary: the encoder and all that is known about its special tokens.

    backend: the encoder; it adds nothing of its own (no BOS, no padding, no truncation).
    prefix_ids: ids that every text starts with, usually just BOS; empty where the model uses none.
    special_ids: tokens that are not text and that decoding leaves out.
    named_tokens: bos_token, eos_token, unk_token, pad_token as texts, "" where there is none.
    templates: chat templates by name; "default" is the one used unless tools ask for "tool_use".
    source: where all this comes from, for error messages.
    """

    backend: tokenizers.Tokenizer
    prefix_ids: tuple[int, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    named_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    source: str


def end_ids(backend: tokenizers.Tokenizer, special_ids: Iterable[int], stated: Iterable[int | None]) -> tuple[int, ...]:
    """All ids that end an answer: first the stated ones in their order, then the known names."""
    special = frozenset(special_ids)
    found = [token_id for token_id in stated if token_id is not None]
    # Where <|return|> ends the answer, <|end|> only ends one of its several messages.
    ends_message = backend.token_to_id("<|return|>") is not None
    for text in END_TOKENS:
        token_id = backend.token_to_id(text)
        if token_id in special and not (text == "<|end|>" and ends_message):
            found.append(token_id)
    return tuple(dict.fromkeys(found))
