"""The tokenizer: text to ids, ids to text, messages to a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflight.text.chat_template import check_messages, check_tools, render
from rooflight.text.gguf_vocab import load_gguf
from rooflight.text.token_bytes import TokenBytes
from rooflight.text.tokenizer_files import load_folder
from rooflight.text.vocabulary import Vocabulary


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template.

    vocab_size: one more than the largest id; the model's own count may be larger (padded rows).
    bos_id: the token a text begins with, None if the vocabulary names none. Whether one is put in
        front of a text is decided by the files, not by its mere existence.
    eos_ids: every token that ends an answer, as far as the tokenizer's files tell.
    special_ids: tokens that are not text; `decode` leaves them out.
    lead: what `decode` takes from the start of a text (sentencepiece's extra space), "" if nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._token_bytes = TokenBytes(vocabulary.backend, vocabulary.source)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self.lead = self._token_bytes.lead

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the chat template files of a folder.

        Raises FileNotFoundError or ValueError naming the file.
        """
        return cls(load_folder(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds it from the metadata of a GGUF file, `tokenizer.ggml.tokens` and its neighbours.

        Raises ValueError naming the key.
        """
        return cls(load_gguf(metadata))

    @property
    def chat_template(self) -> str | None:
        """The chat template used when no tools are given, None if the files have none."""
        return self._vocabulary.templates.get("default")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text are taken as such.

        add_special: begin with BOS if this model's texts do; a text which already begins with it
        gets no second one. An end token is never appended: a prompt is there to be continued.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, not {type(text).__name__}")
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            place = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
            raise ValueError(f"text holds half a surrogate pair at index {place}") from error
        return self._with_prefix(ids) if add_special else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD, unknown ids nothing."""
        skipped = self.special_ids if skip_special else frozenset[int]()
        data = b"".join(self._token_bytes[token_id] for token_id in ids if token_id not in skipped)
        return data.decode("utf-8", errors="replace").removeprefix(self.lead)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, perhaps only a part of a character."""
        return self._token_bytes[token_id]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, as the chat template writes it.

        kwargs are variables of the template (`enable_thinking`, `documents`, ...); it ignores those
        it does not know. Raises ValueError for malformed messages, a failing template or none.
        """
        # `messages` is positional only, so that a client's variable of that name is told apart.
        if "messages" in kwargs:
            raise ValueError("chat template variable 'messages' is reserved")
        check_messages(messages)
        check_tools(tools)
        variables = {
            **self._vocabulary.named_tokens,
            **kwargs,
            "messages": messages,
            # Templates ask either for truth or for none; an empty list must read as none in both.
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render(self._template("tool_use" if tools else "default"), variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; one BOS at the start whether or not the template writes it."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text)

    def _template(self, name: str) -> str:
        templates = self._vocabulary.templates
        template = templates.get(name, templates.get("default"))
        if template is None:
            found = f" (only templates named {', '.join(sorted(templates))})" if templates else ""
            raise ValueError(f"{self._vocabulary.source}: this tokenizer has no chat template{found}")
        return template

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self._vocabulary.prefix_ids)
        start = len(prefix) if ids[: len(prefix)] == prefix else 0
        if self.bos_id in prefix:
            # The text may begin with BOS itself, even twice. Those further on belong to the template:
            # Llama 2, for one, writes one before every turn.
            while start < len(ids) and ids[start] == self.bos_id:
                start += 1
        return prefix + ids[start:]
