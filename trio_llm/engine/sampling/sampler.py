"""Sampler: logits of many rows to one token each, by each row's own parameters.

A row's result depends on its logits, tokens, parameters, seed and position alone. A row that cannot be sampled
gets an error of its own. An option costs something for the rows that use it. Used by the torch executor.

Order: log-probabilities of the model itself; the logits processors, as `LOGITS_PROCESSORS` has them; temperature; the
filters, as `FILTERS` has them; draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trio_llm.engine.sampling.argmax import likeliest, likeliest_of
from trio_llm.engine.sampling.filters import FILTERS, Filter
from trio_llm.engine.sampling.gumbel import token_hashes
from trio_llm.engine.sampling.layout import Layout
from trio_llm.engine.sampling.logits_processors.bans import NOTHING_LEFT
from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor
from trio_llm.engine.sampling.logits_processors.chain import LOGITS_PROCESSORS
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.logprobs import PendingLogprobs
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import RowError, SampledToken
from trio_llm.engine.transfer import HostCopy

__all__ = ["PendingTokens", "Sampler"]

_NOT_FINITE = "the model computed NaN or infinity instead of scores; this request cannot go on"


class PendingTokens:
    """The tokens of a step that was launched."""

    def __init__(self, token_ids: Tensor, best: Tensor, layout: Layout, logprobs: PendingLogprobs | None) -> None:
        self.token_ids = token_ids
        """int64[B], on the device; the next step may be launched with them. Within the vocabulary, also for rows that
        failed, whose tokens mean nothing."""
        self._copy = HostCopy(token_ids, best)
        self._is_processed = layout.is_processed
        self._logprobs = logprobs
        self._logprob_rows = layout.logprobs.rows

    def wait(self) -> list[SampledToken | RowError]:
        """B results in order. Only this waits for the device."""
        token_ids, best = self._copy.wait()
        results: list[SampledToken | RowError] = [
            SampledToken(token) if math.isfinite(score) else self._error(i, score)
            for i, (token, score) in enumerate(zip(token_ids.tolist(), best.tolist(), strict=True))
        ]
        if self._logprobs is not None:
            for i, row in zip(self._logprob_rows, self._logprobs.wait(), strict=True):
                result = results[i]
                if isinstance(result, SampledToken):
                    results[i] = SampledToken(result.token_id, row)
        return results

    def _error(self, row: int, best: float) -> RowError:
        return RowError(NOTHING_LEFT if self._is_processed[row] and best == -math.inf else _NOT_FINITE)


class Sampler:
    """Samples for one model. The state that it keeps between steps saves time and changes no result.

    Args:
        width: tokens in the vocabulary.
        processors: all kinds of logits processors, in the order in which they change scores.
        filters: all kinds of filters, in the order in which they are applied to a row.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        *,
        width: int,
        device: torch.device,
        processors: Rows[type[LogitsProcessor]] = LOGITS_PROCESSORS,
        filters: Rows[type[Filter]] = FILTERS,
    ) -> None:
        self._state = SamplerState(eos_token_ids, width=width, device=device)
        self._processors = processors
        self._filters = filters
        with torch.inference_mode():
            self._hashes = token_hashes(torch.arange(width, dtype=torch.int32, device=device).unsqueeze(0))
        self._layout: Layout | None = None

    @property
    def num_states(self) -> int:
        """Sequences with state of their own."""
        return len(self._state)

    @property
    def num_count_rows(self) -> int:
        """Rows in the table of counts for penalties. Each takes 4 bytes per token of the vocabulary."""
        return len(self._state.counts.table)

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Rows[Sequence], *, positions: list[int], previous: Tensor) -> PendingTokens:
        """Begin to choose the next token of every row; wait for nothing on a GPU.

        Args:
            logits: [B, V] of any floating type; not changed.
            rows: B different sequences with their seeds set. The host may lack the last token of each, no other.
            positions: where the new tokens will stand in their sequences: how many tokens come before each.
            previous: int64[B], the token before each, on the device.
        """
        layout = self._layout
        if layout is None or not layout.goes_on_with(rows, positions):
            if layout is not None:
                layout.close()
            layout = self._layout = Layout(rows, positions, self._state, self._processors, self._filters)
        best, token_ids = self._choose(logits, layout, previous)
        layout.advance()
        return PendingTokens(token_ids, best, layout, layout.logprobs.launch(logits, token_ids))

    def _choose(self, logits: Tensor, layout: Layout, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The best score of each row, and its token, int64[B]."""
        order, index, draw = layout.order, layout.index, layout.draw
        if order.num_scores == 0:
            return likeliest(logits)
        scores = (logits if index.scores is None else logits.index_select(0, index.scores)).float()
        if scores is logits and (layout.processors or (draw is not None and draw.filtered)):
            scores = logits.clone()
        for processor in layout.processors:
            processor.apply(scores[: order.num_processed], previous)
        parts = []
        num_greedy = order.num_scores - order.num_drawn
        if num_greedy > 0:
            parts.append(likeliest(scores[:num_greedy]))
        if draw is not None:
            parts.append(draw.choose(scores[num_greedy:], self._hashes, may_change=scores is not logits))
        if index.greedy is not None and len(index.greedy):
            best, token_ids = likeliest_of(logits, index.greedy, index.greedy_runs)
            parts.append((best.float(), token_ids))
        if len(parts) == 1 and index.back is None:
            return parts[0]
        best, token_ids = (torch.cat(column) for column in zip(*parts, strict=True))
        if index.back is None:
            return best, token_ids
        return best.index_select(0, index.back), token_ids.index_select(0, index.back)
