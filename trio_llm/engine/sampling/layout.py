"""Layout: the sorted rows of a batch, with their parameters on the device.

Made when a batch changes, and used as long as each of the same rows continues by one token. Used by the sampler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from operator import attrgetter

import torch

from trio_llm.engine.sampling.draw import Draw, FilteredRows
from trio_llm.engine.sampling.filters import Filter
from trio_llm.engine.sampling.logits_processors.base import NO_LIMIT, LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.logprobs import LogprobRows
from trio_llm.engine.sampling.row_order import RowIndex, RowOrder
from trio_llm.engine.scheduling.sequence import Sequence

__all__ = ["Layout"]

_num_prompt_tokens = attrgetter("num_prompt_tokens")


class Layout:
    """Scores are the rows in `order`, without the greedy ones at its end.

    Args:
        rows: B sequences.
        positions: of the token to sample next, for each of them.
        processors: all kinds of logits processors, in the order in which they change scores.
        filters: all kinds of filters, in the order in which they are applied to a row.
    """

    def __init__(
        self,
        rows: Rows[Sequence],
        positions: Rows[int],
        state: SamplerState,
        processors: Rows[type[LogitsProcessor]],
        filters: Rows[type[Filter]],
    ) -> None:
        self._rows = list(rows)
        self._positions = list(positions)
        """Positions of the tokens that the next step samples."""
        self._num_prompt_tokens = list(map(_num_prompt_tokens, rows))
        applied = [[i for i, row in enumerate(self._rows) if kind.applies(row, positions[i])] for kind in processors]
        self.is_processed = [False] * len(self._rows)
        for i in itertools.chain.from_iterable(applied):
            self.is_processed[i] = True
        is_drawn = [row.params.temperature > 0 for row in self._rows]
        self.order = RowOrder(
            self.is_processed,
            is_drawn,
            [
                [drawn and kind.applies(row.params, state.width) for row, drawn in zip(rows, is_drawn, strict=True)]
                for kind in filters
            ],
        )
        self.index = RowIndex(self.order, state.device)
        self.processors: list[LogitsProcessor] = []
        if self.order.num_processed:
            state.forget_others(self._rows)
            self.processors = self._make_processors(processors, applied, state)
        self._steps_left = min((one.num_steps for one in self.processors), default=NO_LIMIT)
        self.draw = self._make_draw(filters, state.width, state.device)
        self.logprobs = LogprobRows([row.params.logprobs for row in rows], state.device)

    def goes_on_with(self, rows: Rows[Sequence], positions: Rows[int]) -> bool:
        """Whether this is the layout for these, too: the same sequences, each one token further."""
        return (
            self._steps_left > 0
            and self._positions == positions
            and self._rows == rows
            # A session's new input changes it, and with it the parameters. The positions may not show that: if as many
            # tokens were dropped at the end of the answer as the input has, they continue as before.
            and self._num_prompt_tokens == list(map(_num_prompt_tokens, rows))
        )

    def advance(self) -> None:
        """A step was launched."""
        self._steps_left -= 1
        self._positions = [position + 1 for position in self._positions]

    def close(self) -> None:
        """No further step comes."""
        for processor in self.processors:
            processor.close()

    def _make_processors(
        self, kinds: Rows[type[LogitsProcessor]], applied: Rows[list[int]], state: SamplerState
    ) -> list[LogitsProcessor]:
        """
        Args:
            applied: the rows of the batch that need each kind.
        """
        index_of = {i: index for index, i in enumerate(self.order.rows[: self.order.num_processed])}
        return [
            kind.make([ProcessedRow(self._rows[i], self._positions[i], index_of[i], i) for i in needed], state)
            for kind, needed in zip(kinds, applied, strict=True)
            if needed
        ]

    def _make_draw(self, filters: Rows[type[Filter]], width: int, device: torch.device) -> Draw | None:
        order = self.order
        begin = order.num_scores - order.num_drawn
        drawn = order.rows[begin : order.num_scores]
        if not drawn:
            return None
        params = [self._rows[i].params for i in drawn]
        filtered = []
        for number, kind in enumerate(filters):
            for places in order.slices_of(number):
                some = slice(places.start - begin, places.stop - begin)
                filtered.append(FilteredRows(some, kind.make(params[some], width=width, device=device)))
        return Draw(params, [self._positions[i] for i in drawn], filtered, device)
