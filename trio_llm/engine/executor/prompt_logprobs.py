"""Log-probabilities of the prompt tokens that a step computes. Used by the torch executor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from trio_llm.engine.models.base import Model
from trio_llm.engine.sampling.logprobs import PendingLogprobs
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.engine.transfer import to_device
from trio_llm.wire.messages import LogprobRow

__all__ = ["PendingPromptLogprobs", "has_prompt_logprobs", "launch_prompt_logprobs"]

_SLICE_BYTES: Final = 32 * 1024 * 1024
"""Size of the float32 logits in one slice. Computing log-probabilities of them takes several times as much memory."""


class PendingPromptLogprobs:
    """Log-probabilities of prompts that a launched step computes."""

    def __init__(self, slices: list[PendingLogprobs], lengths: list[int]) -> None:
        """
        Args:
            slices: together all positions, chunk after chunk.
            lengths: number of positions of each chunk.
        """
        self._slices = slices
        self._lengths = lengths

    def wait(self) -> tuple[list[LogprobRow], ...]:
        """One list per chunk that has some, in the plan's order; one row per position."""
        rows = (row for part in self._slices for row in part.wait())
        return tuple(list(islice(rows, length)) for length in self._lengths)


def has_prompt_logprobs(plan: StepPlan) -> bool:
    """A chunk of the plan gives log-probabilities of its prompt. They are computed from the step's hidden states."""
    return any(chunk.prompt_logprob_positions for chunk in plan.chunks)


def launch_prompt_logprobs(
    plan: StepPlan, hidden: Tensor, model: Model, *, first_tokens: Sequence[int]
) -> PendingPromptLogprobs:
    """Begin to compute them, for all chunks together: the head reads its weights once per slice.

    Args:
        hidden: [T, H].
        first_tokens: the row of each chunk's first token in `hidden`.
    """
    rows: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    lengths: list[int] = []
    for chunk, first in zip(plan.chunks, first_tokens, strict=True):
        count = chunk.sequence.params.prompt_logprobs
        if count is None or not (positions := chunk.prompt_logprob_positions):
            continue
        # What the model says about a token is in the row of the token before it.
        rows += (first + position - chunk.start - 1 for position in positions)
        token_ids += chunk.sequence.token_ids[positions.start : positions.stop]
        num_top += [count] * len(positions)
        lengths.append(len(positions))

    slice_rows = max(1, _SLICE_BYTES // (4 * model.logits_width))
    slices = []
    for begin in range(0, len(rows), slice_rows):
        part = slice(begin, begin + slice_rows)
        index, own = (to_device(ids[part], model.device, dtype=torch.int64) for ids in (rows, token_ids))
        slices.append(PendingLogprobs(model.logits(hidden.index_select(0, index)), own, num_top[part]))
    return PendingPromptLogprobs(slices, lengths)
