"""Text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings.

Nothing here knows of tensors, models or requests.
"""

from __future__ import annotations

from rooflight.text.detokenizer import Detokenizer
from rooflight.text.stops import StopStrings
from rooflight.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "Tokenizer"]
