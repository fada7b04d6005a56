"""The state of a chat: its messages, and whether one more fits the context."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from rooflight.cli.loading import OpenModel
from rooflight.engine import Chunk, Completion, SamplingParams


class Conversation:
    """Messages so far, with the system message in front. The model's context is `context` tokens long."""

    def __init__(
        self, opened: OpenModel, params: SamplingParams, system: str | None, template: Mapping[str, Any]
    ) -> None:
        self._opened = opened
        self._params = params
        self._template = template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.context = opened.llm.max_model_len
        self.messages = list(self._system)
        self._encode("")  # what is wrong with the template or its arguments is said before the first question

    def clear(self) -> None:
        """Start anew; the system message stays."""
        self.messages = list(self._system)

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """The answer to one more message. ContextFull, with nothing changed, if it does not fit.

        Messages are kept when `answered` says so: a question that was not answered leaves no trace.
        """
        ids = self._encode(text)
        if len(ids) >= self.context:
            raise ContextFull(len(ids), self.context)
        return self._opened.llm.stream(ids, self._params)

    def answered(self, question: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def fills_context(self, completion: Completion) -> bool:
        """Whether the answer ended because the context did."""
        used = len(completion.prompt_token_ids) + len(completion.token_ids)
        return completion.finish_reason == "length" and used >= self.context

    def _encode(self, text: str) -> list[int]:
        messages = [*self.messages, {"role": "user", "content": text}]
        return self._opened.tokenizer.encode_chat(messages, **self._template)


class ContextFull(ValueError):
    """The conversation with the new message does not fit."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(f"context full: this makes {tokens} tokens, the context is {context}; /clear empties it")
