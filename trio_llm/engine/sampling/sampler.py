"""Sampler: logits of many rows to one token each, by each row's own parameters.

A row's result depends on its logits, parameters, seed and position alone. A row that cannot be sampled
gets an error of its own. Used by the torch executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trio_llm.engine.executor.base import RowError, SampledToken
from trio_llm.engine.sampling.bans import NOTHING_LEFT, banned_tokens
from trio_llm.engine.sampling.filters import filter_threshold
from trio_llm.engine.sampling.keyed_noise import gumbel_noise, row_key
from trio_llm.engine.sampling.logprobs import logprob_rows
from trio_llm.engine.scheduling.sequence import Sequence as EngineSequence
from trio_llm.sampling import SamplingParams

__all__ = ["SamplingRow", "sample", "sampling_row"]

_NOT_FINITE = "the model computed NaN or infinity instead of scores; this request cannot go on"


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know about one row."""

    params: SamplingParams
    seed: int
    position: int
    """Where the new token will stand in its sequence."""
    banned: frozenset[int] = frozenset()
    """Tokens that must not be sampled at this position."""


def sampling_row(sequence: EngineSequence, position: int, eos_token_ids: Iterable[int]) -> SamplingRow:
    """The row for a sequence's token at `position`. The front end has drawn a seed where the caller did not set one."""
    params = sequence.params
    assert params.seed is not None
    return SamplingRow(params, params.seed, position, banned_tokens(sequence, eos_token_ids))


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | RowError]:
    """Choose the next token of every row.

    Order: log-probabilities of the model itself; tokens allowed; tokens banned; temperature; top-k; top-p; draw.

    Args:
        logits: [B, V] of any floating type; not changed.
        rows: B of them.
    Returns:
        B results in order.
    """
    likeliest, errors = _argmax(logits)
    scores = logits
    if any(row.banned or row.params.allowed_token_ids is not None for row in rows):
        scores = _restrict(logits, rows)
        likeliest, after = _argmax(scores)
        errors = [
            _NOT_FINITE if before else NOTHING_LEFT if now else None for before, now in zip(errors, after, strict=True)
        ]
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy and errors[i] is None]
    tokens: list[int] = likeliest.tolist()
    if drawn:
        picked = scores if len(drawn) == len(rows) else scores[torch.tensor(drawn, device=scores.device)]
        for i, token in zip(drawn, _draw(picked.float(), [rows[i] for i in drawn]).tolist(), strict=True):
            tokens[i] = token

    results: list[SampledToken | RowError] = [
        SampledToken(token) if error is None else RowError(error) for token, error in zip(tokens, errors, strict=True)
    ]
    _add_logprobs(results, logits, rows)
    return results


def _argmax(logits: Tensor) -> tuple[Tensor, list[str | None]]:
    """The likeliest token of each row, int64[B], and an error for each row that has none."""
    best = logits.argmax(1)  # NaN counts as the largest
    values = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    return best, [None if is_fine else _NOT_FINITE for is_fine in torch.isfinite(values).tolist()]


def _restrict(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """A copy without the tokens that each row must not choose. Ids that the model does not have are ignored."""
    width = logits.shape[1]
    pairs = [(i, token) for i, row in enumerate(rows) for token in row.banned if token < width]
    scores = logits.clone()
    for i, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            allowed = [token for token in row.params.allowed_token_ids if token < width]
            where = torch.tensor(allowed, dtype=torch.int64, device=logits.device)
            scores[i] = float("-inf")
            scores[i, where] = logits[i, where]
    if pairs:
        where = torch.tensor(pairs, dtype=torch.int64, device=logits.device).unbind(1)
        scores[where] = float("-inf")
    return scores


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw one token a row, int64[R], from float32[R, V], which are not changed."""
    device = logits.device
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device)
    scaled = logits / temperature.unsqueeze(1)
    filtered = [i for i, row in enumerate(rows) if row.params.top_p < 1 or 0 < row.params.top_k < logits.shape[1]]
    if filtered:
        index = torch.tensor(filtered, device=device)
        chosen = scaled[index]
        threshold = filter_threshold(
            chosen,
            torch.tensor([min(rows[i].params.top_k, logits.shape[1]) for i in filtered], device=device),
            torch.tensor([rows[i].params.top_p for i in filtered], dtype=torch.float32, device=device),
        )
        scaled[index] = chosen.masked_fill(chosen < threshold, float("-inf"))
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=device).unsqueeze(0)
    noise = gumbel_noise([row_key(row.seed, row.position) for row in rows], token_ids)
    return scaled.add_(noise).argmax(1)


def _add_logprobs(results: list[SampledToken | RowError], logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Put log-probabilities, of the distribution before bans and temperature, to the rows that asked for them."""
    wanted = [
        (i, result.token_id)
        for i, (row, result) in enumerate(zip(rows, results, strict=True))
        if row.params.logprobs is not None and isinstance(result, SampledToken)
    ]
    if not wanted:
        return
    index = [i for i, _ in wanted]
    counts = [rows[i].params.logprobs or 0 for i in index]
    picked = logits[torch.tensor(index, device=logits.device)]
    for (i, token), row in zip(wanted, logprob_rows(picked, [token for _, token in wanted], counts), strict=True):
        results[i] = SampledToken(token, row)
