"""Log-probabilities of chosen tokens and of the likeliest ones, from logits.

Used by the sampler for sampled tokens, and by the torch executor for the tokens of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trio_llm.engine.transfer import HostCopy, to_device
from trio_llm.sampling import MAX_LOGPROBS
from trio_llm.wire.messages import LogprobRow

__all__ = ["LogprobRows", "PendingLogprobs", "logprob_rows"]


class LogprobRows:
    """Which rows of a batch get log-probabilities.

    Args:
        num_top: alternatives that each row asks for; None: no log-probabilities.
    """

    def __init__(self, num_top: Sequence[int | None], device: torch.device) -> None:
        self.rows = [row for row, count in enumerate(num_top) if count is not None]
        self._num_top = [count for count in num_top if count is not None]
        self._index: Tensor | None = None  # int64; None: all rows
        if 0 < len(self.rows) < len(num_top):
            self._index = to_device(self.rows, device, dtype=torch.int64)

    def launch(self, logits: Tensor, token_ids: Tensor) -> PendingLogprobs | None:
        """Begin to compute those of all rows together; None: no row gets any. Arguments as for `PendingLogprobs`."""
        if not self.rows:
            return None
        if self._index is not None:
            logits, token_ids = logits.index_select(0, self._index), token_ids.index_select(0, self._index)
        return PendingLogprobs(logits, token_ids, self._num_top)


class PendingLogprobs:
    """Begins to compute, and does not wait. Takes float32[N, V] twice besides the logits.

    Args:
        logits: [N, V] of any floating type; not changed.
        token_ids: int64[N], the ids that stand first in their rows.
        num_top: N counts of alternatives, each up to MAX_LOGPROBS.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> None:
        logprobs = torch.log_softmax(logits.float(), dim=1)
        own = logprobs.gather(1, token_ids.unsqueeze(1))
        ranks = (logprobs > own).sum(1, dtype=torch.int32) + 1
        # Always the same count, so that the order of equals cannot depend on what the neighbours ask for.
        top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
        self._num_top = num_top
        self._copy = HostCopy(token_ids, own.squeeze(1), ranks, top.indices, top.values)

    def wait(self) -> list[LogprobRow]:
        """One row per token, once the device has computed them."""
        ids, own, ranks, top_ids, top_values = (tensor.tolist() for tensor in self._copy.wait())
        return [
            LogprobRow([ids[n], *top_ids[n][:count]], [own[n], *top_values[n][:count]], ranks[n])
            for n, count in enumerate(self._num_top)
        ]


def logprob_rows(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[LogprobRow]:
    """What `PendingLogprobs` gives for ids that the host knows. Waits for the device."""
    return PendingLogprobs(logits, to_device(token_ids, logits.device, dtype=torch.int64), num_top).wait()
