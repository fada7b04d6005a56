"""What the engine keeps beside a sequence to deliver it: its text, its log-probabilities, its times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rooflight.engine.outputs import Chunk, Completion, FinishReason, Timing, TokenLogprobs
from rooflight.engine.params import SamplingParams
from rooflight.engine.sequence import Sequence
from rooflight.engine.text_stream import TextStream

OnChunk = Callable[[Chunk], object]


@dataclass(eq=False)
class Group:
    """The n requests of one prompt. `id` is what the caller knows: the request id of the first."""

    id: int
    prompt: list[int]  # if its log-probabilities are wanted, else empty: a copy of every prompt costs a step
    params: SamplingParams
    open: int  # requests of it that have not ended
    on_chunk: OnChunk | None = None
    streams: bool = True  # else nobody looks at a chunk before the last one, and none is made
    later: list[Request] = field(default_factory=list)  # begin when the first one's prompt is in the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(eq=False)
class Request:
    """A sequence and what has been delivered of it."""

    sequence: Sequence
    stream: TextStream
    group: Group
    index: int  # which of the prompt's n completions
    submitted: float  # seconds, by time.perf_counter
    first_token: float = 0.0
    last_token: float = 0.0
    shown: int = 0  # tokens that have been delivered: the sequence may have more, of which no one knows yet
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    ended: bool = False

    @property
    def id(self) -> int:
        return self.sequence.request_id

    @property
    def is_quiet(self) -> bool:
        """Whether a token that does not end it changes nothing that anybody sees."""
        group = self.group
        return not (group.streams or group.on_chunk or self.stream.has_text) and group.params.logprobs is None

    def chunk(self, text: str, token: int, report: TokenLogprobs | None) -> Chunk | None:
        """One more token; None if nobody looks."""
        self.text.append(text)
        new = self._new(report)
        return Chunk(text, (token,), logprobs=new, index=self.index) if self.group.streams else None

    def last_chunk(
        self, text: str, token: int | None, report: TokenLogprobs | None, reason: FinishReason, now: float
    ) -> Chunk:
        """The end, with or without a last token."""
        self.text.append(text)
        sequence, asked = self.sequence, self.sequence.params.logprobs is not None
        new = self._new(report) if token is not None else () if asked else None
        prompt_logprobs = self.group.prompt_logprobs
        completion = Completion(
            text="".join(self.text),
            token_ids=tuple(sequence.tokens[sequence.num_prompt : sequence.num_prompt + self.shown]),
            prompt_token_ids=tuple(sequence.tokens[: sequence.num_prompt]),
            finish_reason=reason,
            timing=Timing((self.first_token or now) - self.submitted, now - self.submitted),
            error=self.error,
            logprobs=tuple(self.logprobs) if asked else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            cached_tokens=sequence.num_cached,
            index=self.index,
        )
        tokens = () if token is None else (token,)
        return Chunk(text, tokens, reason, completion, new, self.index)

    def _new(self, report: TokenLogprobs | None) -> tuple[TokenLogprobs, ...] | None:
        if report is None:
            return None
        self.logprobs.append(report)
        return (report,)
