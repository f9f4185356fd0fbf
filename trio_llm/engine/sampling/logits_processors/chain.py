"""The logits processors, in the order in which they change scores. A new one is one module and one entry here."""

from __future__ import annotations

from typing import Final

from trio_llm.engine.sampling.logits_processors.allowed_tokens import AllowedTokens
from trio_llm.engine.sampling.logits_processors.bad_words import BadWords
from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor
from trio_llm.engine.sampling.logits_processors.min_tokens import MinTokens
from trio_llm.engine.sampling.logits_processors.penalties import Penalties
from trio_llm.engine.sampling.logits_processors.token_bias import TokenBias

__all__ = ["LOGITS_PROCESSORS"]

LOGITS_PROCESSORS: Final[tuple[type[LogitsProcessor], ...]] = (AllowedTokens, BadWords, TokenBias, MinTokens, Penalties)
