"""StepBudget: how many prompt tokens a step may compute beside answers, so that the answers do not pause.

Pure: durations go in, a number of tokens comes out. Fed by StepPipeline.
"""

from __future__ import annotations

from typing import Final

__all__ = ["StepBudget"]

_BASE_WEIGHT: Final = 0.25
"""Weight of the newest step in the average of steps without prompt tokens."""
_HALF_WEIGHT_TOKENS: Final = 64
"""A step with so many prompt tokens counts as much as all steps before it; steps with few of them say little."""


class StepBudget:
    """Keeps the duration of steps in which sequences decode near a target.

    The model behind it: a step takes a base, which is what a step without prompt tokens takes, and a constant time
    per prompt token. Both are measured all the time, so that the budget follows the device, its other users and the
    length of contexts. A step that took longer than expected shrinks the budget of the very next one.

    Args:
        target_s: seconds that a step should take at most. One block of prompt tokens is computed even if it takes
            longer.
        block_size: the budget is a multiple of this number of tokens.
        max_tokens: the largest budget.
    """

    def __init__(self, target_s: float, *, block_size: int, max_tokens: int) -> None:
        self._target_s = target_s
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._base_s: float | None = None
        self._token_s: float | None = None
        """Seconds per prompt token; None: not measured yet."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that the next step may compute if sequences decode in it."""
        if self._token_s is None:
            return self._max_tokens
        left_s = max(0.0, self._target_s - (self._base_s or 0.0))
        if left_s >= self._token_s * self._max_tokens:
            return self._max_tokens
        num_blocks = max(1, int(left_s / self._token_s) // self._block_size)
        return min(num_blocks * self._block_size, self._max_tokens)

    def observe(self, num_prefill_tokens: int, seconds: float, *, has_decodes: bool) -> None:
        """Take the measurement of one step.

        Args:
            num_prefill_tokens: prompt tokens that it computed.
            has_decodes: sequences decoded in it.
        """
        if num_prefill_tokens == 0:
            self._base_s = _average(self._base_s, seconds, _BASE_WEIGHT)
            return
        base_s = self._base_s if has_decodes and self._base_s is not None else 0.0
        token_s = max(0.0, seconds - base_s) / num_prefill_tokens
        weight = num_prefill_tokens / (num_prefill_tokens + _HALF_WEIGHT_TOKENS)
        self._token_s = _average(self._token_s, token_s, weight)


def _average(before: float | None, newest: float, weight: float) -> float:
    return newest if before is None else before + weight * (newest - before)
