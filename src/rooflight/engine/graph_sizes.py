"""Steps that have CUDA graphs."""

from __future__ import annotations

from rooflight.engine.static_batch import PromptSize

# Of captured steps with prompts: alone, where up to eight rows take what one takes in the head's kernel, and beside
# sequences that decode.
PROMPT_SIZES = tuple(PromptSize(tokens, 8) for tokens in (32, 64, 128, 256, 512, 1024, 2048, 4096))
MIXED_SIZES = tuple(
    PromptSize(*size)
    for size in (
        (256, 16, 32),
        (1024, 32, 64),
        (2048, 64, 256),
        (4096, 64, 256),
        (8192, 128, 256),
        (8192, 128, 1024),
        (16384, 128, 256),
        (16384, 128, 1024),
    )
)
COMPUTED = 8192  # tokens of a step from which the products of padding take longer than the launches that a graph saves


def buckets(most: int) -> list[int]:
    """Numbers of rows that have graphs: powers of two, and the most there may be."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def prompt_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[PromptSize]:
    """Steps with prompts that have graphs, the smallest first."""
    sizes = {
        PromptSize(
            min(size.tokens, max_num_batched_tokens), min(size.prompts, max_num_seqs), min(size.decodes, max_num_seqs)
        )
        for size in (*PROMPT_SIZES, *MIXED_SIZES)
        if size.tokens < 2 * max_num_batched_tokens
    }
    return sorted(sizes, key=lambda size: (size.tokens + size.decodes, size))


def suits(room: PromptSize, size: PromptSize) -> bool:
    """Whether a step of that size should run in a graph with that much room."""
    return room.holds(size) and (room.tokens < COMPUTED or 4 * size.tokens >= 3 * room.tokens)
