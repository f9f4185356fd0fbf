"""Log-probabilities of chosen tokens and of the likeliest ones, from logits.

Used by the sampler for sampled tokens, and by the torch executor for the tokens of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trio_llm.sampling import MAX_LOGPROBS
from trio_llm.wire.messages import LogprobRow

__all__ = ["logprob_rows"]


def logprob_rows(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[LogprobRow]:
    """One row a position. Takes float32[N, V] twice besides the logits.

    Args:
        logits: [N, V] of any floating type; not changed.
        token_ids: N ids that stand first in their rows.
        num_top: N counts of alternatives, each up to MAX_LOGPROBS.
    """
    logprobs = torch.log_softmax(logits.float(), dim=1)
    own = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1))
    ranks: list[int] = ((logprobs > own).sum(1) + 1).tolist()
    # Always the same count, so that the order of equals cannot depend on what the neighbours ask for.
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
    top_ids: list[list[int]] = top.indices.tolist()
    top_values: list[list[float]] = top.values.tolist()
    own_values: list[float] = own.squeeze(1).tolist()
    return [
        LogprobRow([token_id, *top_ids[n][:count]], [own_values[n], *top_values[n][:count]], ranks[n])
        for n, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
