"""Sampler: logits of many rows to one token each, by each row's own parameters.

A row's result depends on its logits, tokens, parameters, seed and position alone. A row that cannot be sampled
gets an error of its own. An option costs something for the rows that use it. Used by the torch executor.

Order: log-probabilities of the model itself; allowed_token_ids; bad_words, min_tokens and logit_bias; penalties;
temperature; min_p; top_k; top_p; draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trio_llm.engine.sampling.bans import NOTHING_LEFT
from trio_llm.engine.sampling.kept import KeptSequences
from trio_llm.engine.sampling.keyed_noise import log_race, row_keys, token_hashes
from trio_llm.engine.sampling.layout import Layout
from trio_llm.engine.sampling.logprobs import PendingLogprobs
from trio_llm.engine.sampling.transfer import HostCopy
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import RowError, SampledToken

__all__ = ["PendingTokens", "Sampler"]

_BLOCK_TOKENS = 4 * 49_152
"""Scores for each thread of a CPU at once: noise takes many passes, which are quicker in its cache."""
_CHUNK = 256
_MANY_TOKENS = 4096
_NOT_FINITE = "the model computed NaN or infinity instead of scores; this request cannot go on"


class PendingTokens:
    """The tokens of a step that was launched."""

    def __init__(self, token_ids: Tensor, best: Tensor, layout: Layout, logprobs: PendingLogprobs | None) -> None:
        self.token_ids = token_ids
        """int64[B], on the device; the next step may be launched with them. Within the vocabulary, also for rows that
        failed, whose tokens mean nothing."""
        self._copy = HostCopy(token_ids, best)
        self._is_edited = layout.is_edited
        self._has_logprobs = layout.has_logprobs
        self._logprobs = logprobs

    def wait(self) -> list[SampledToken | RowError]:
        """B results in order. The one place that waits for the device."""
        token_ids, best = self._copy.wait()
        results: list[SampledToken | RowError] = [
            SampledToken(token) if math.isfinite(score) else self._error(i, score)
            for i, (token, score) in enumerate(zip(token_ids.tolist(), best.tolist(), strict=True))
        ]
        if self._logprobs is not None:
            wanted = (i for i, has in enumerate(self._has_logprobs) if has)
            for i, row in zip(wanted, self._logprobs.wait(), strict=True):
                result = results[i]
                if isinstance(result, SampledToken):
                    results[i] = SampledToken(result.token_id, row)
        return results

    def _error(self, row: int, best: float) -> RowError:
        return RowError(NOTHING_LEFT if self._is_edited[row] and best == -math.inf else _NOT_FINITE)


class Sampler:
    """For one model. What it keeps between steps saves time and changes no result."""

    def __init__(self, eos_token_ids: tuple[int, ...], *, width: int, device: torch.device) -> None:
        self._kept = KeptSequences(eos_token_ids, width=width, device=device)
        with torch.inference_mode():
            self._hashes = token_hashes(torch.arange(width, dtype=torch.int32, device=device).unsqueeze(0))
        self._layout: Layout | None = None

    @property
    def num_kept(self) -> int:
        """Sequences that something is kept of."""
        return len(self._kept)

    @property
    def num_count_rows(self) -> int:
        """Rows of counts for penalties that memory is taken for, 4 bytes a token of the vocabulary each."""
        return len(self._kept.counts.table)

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
            layout = self._layout = Layout(rows, positions, self._kept)
        best, token_ids = self._choose(logits, layout, previous)
        layout.advance()
        logprobs = None
        if layout.num_top:
            of_rows, of_tokens = logits, token_ids
            if layout.logprob_rows is not None:
                of_rows = logits.index_select(0, layout.logprob_rows)
                of_tokens = token_ids.index_select(0, layout.logprob_rows)
            logprobs = PendingLogprobs(of_rows, of_tokens, layout.num_top)
        return PendingTokens(token_ids, best, layout, logprobs)

    def _choose(self, logits: Tensor, layout: Layout, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The best score of each row, and its token, int64[B]."""
        if layout.num_scores == 0:
            return _likeliest(logits)
        scores = (logits if layout.scored is None else logits.index_select(0, layout.scored)).float()
        if scores is logits and (layout.edits or layout.regions):
            scores = logits.clone()
        for edit in layout.edits:
            edit.apply(scores[: layout.num_edited], previous)
        parts = []
        if layout.drawn_from > 0:
            parts.append(_likeliest(scores[: layout.drawn_from]))
        if layout.drawn_from < layout.num_scores:
            parts.append(self._draw(scores, layout, is_own=scores is not logits))
        if layout.greedy is not None and len(layout.greedy):
            best, token_ids = _likeliest_of(logits, layout.greedy, layout.greedy_runs)
            parts.append((best.float(), token_ids))
        if len(parts) == 1 and layout.back is None:
            return parts[0]
        best, token_ids = (torch.cat(column) for column in zip(*parts, strict=True))
        if layout.back is None:
            return best, token_ids
        return best.index_select(0, layout.back), token_ids.index_select(0, layout.back)

    def _draw(self, scores: Tensor, layout: Layout, *, is_own: bool) -> tuple[Tensor, Tensor]:
        """A token of each row to draw, int64[D], and the score that won it.

        Args:
            is_own: the scores may be changed.
        """
        drawn = scores[layout.drawn_from :]
        if layout.temperature is not None:
            drawn = drawn.div_(layout.temperature) if is_own else drawn / layout.temperature
        for region in layout.regions:
            part = scores[region.begin : region.end]
            part.masked_fill_(part < region.filter.threshold(part), float("-inf"))
        keys = row_keys(layout.seeds, layout.positions)
        layout.positions.add_(1)
        num_rows = max(1, torch.get_num_threads() * _BLOCK_TOKENS // scores.shape[1])
        if scores.is_cuda or len(keys) <= num_rows:
            return _likeliest(drawn - log_race(keys, self._hashes))
        blocks = [
            _likeliest(some - log_race(keys_of_some, self._hashes))
            for some, keys_of_some in zip(drawn.split(num_rows), keys.split(num_rows), strict=True)
        ]
        best, token_ids = (torch.cat(column) for column in zip(*blocks, strict=True))
        return best, token_ids


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each row, the first of equals, and its index, int64[R]. NaN counts as the largest."""
    width = scores.shape[1]
    if scores.is_cuda or width < _MANY_TOKENS:
        best, index = scores.max(1)
        return best, index
    # On a CPU the index costs many times what the value does, so it is looked for in one chunk.
    candidates = _candidates(_chunk_maxima(scores), width)
    best, place = scores.gather(1, candidates).max(1)
    return best, candidates.gather(1, place.unsqueeze(1)).squeeze(1)


def _likeliest_of(scores: Tensor, rows: Tensor, runs: list[slice]) -> tuple[Tensor, Tensor]:
    """`_likeliest` of some rows. On a CPU copying them would cost more than all else.

    Args:
        rows: int64[R], ascending.
        runs: the same.
    """
    width = scores.shape[1]
    if scores.is_cuda or width < _MANY_TOKENS:
        return _likeliest(scores.index_select(0, rows))
    candidates = _candidates(torch.cat([_chunk_maxima(scores[run]) for run in runs]), width)
    best, place = scores[rows.unsqueeze(1), candidates].max(1)
    return best, candidates.gather(1, place.unsqueeze(1)).squeeze(1)


def _chunk_maxima(scores: Tensor) -> Tensor:
    """The largest score of each whole chunk of each row."""
    num_chunks = scores.shape[1] // _CHUNK
    return scores[:, : num_chunks * _CHUNK].unflatten(1, (num_chunks, _CHUNK)).amax(2)


def _candidates(maxima: Tensor, width: int) -> Tensor:
    """Tokens of which one is the likeliest, int64[R, K]: those of the first best chunk, and those behind all chunks."""
    candidates = maxima.argmax(1, keepdim=True) * _CHUNK + torch.arange(_CHUNK)
    if (begin := maxima.shape[1] * _CHUNK) < width:
        candidates = torch.cat((candidates, torch.arange(begin, width).expand(len(maxima), -1)), dim=1)
    return candidates
