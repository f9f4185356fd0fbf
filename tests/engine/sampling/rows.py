"""Sequences, steps of a sampler, and what a step should give by a rule of one row at a time."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.sequences import make_sequence
from trio_llm.engine.sampling.gumbel import gumbel_noise, mix_seeds, row_keys, token_hashes
from trio_llm.engine.sampling.logits_processors.bans import banned_tokens
from trio_llm.engine.sampling.sampler import Sampler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import RowError, SampledToken
from trio_llm.sampling import SamplingParams

Results = list[SampledToken | RowError]


def make_row(
    token_ids: Rows[int] = (1,),
    *,
    num_output_tokens: int = 0,
    bad_words: list[list[int]] | None = None,
    **params: Any,
) -> Sequence:
    """A sequence for one row of a step, with the sampling parameters given by name."""
    num_prompt_tokens = len(token_ids) - num_output_tokens
    return make_sequence(
        "a",
        token_ids[:num_prompt_tokens],
        SamplingParams(**{"seed": 0, **params}),
        generated=token_ids[num_prompt_tokens:],
        bad_words=bad_words or [],
    )


def make_sampler(width: int, eos_token_ids: tuple[int, ...] = ()) -> Sampler:
    return Sampler(eos_token_ids, width=width, device=torch.device("cpu"))


def sample(
    logits: Tensor, sequences: list[Sequence], *, sampler: Sampler | None = None, eos_token_ids: tuple[int, ...] = ()
) -> Results:
    """One step; the sequences do not change."""
    sampler = sampler or make_sampler(logits.shape[1], eos_token_ids)
    previous = torch.tensor([one.token_ids[-1] for one in sequences])
    positions = [len(one.token_ids) for one in sequences]
    return sampler.launch(logits, sequences, positions=positions, previous=previous).wait()


def run(
    sampler: Sampler, sequences: list[Sequence], *, logits_at: Any, num_steps: int, is_late: bool = False
) -> list[Results]:
    """Steps that append what they sample. Rows that fail get no token, and so the same position again.

    Args:
        logits_at: of a sequence, its logits at its present length, float32[V].
        is_late: each step is launched before the token of the step before is appended, as with run-ahead.
    """
    steps = []
    lengths = [len(one.token_ids) for one in sequences]
    tokens = torch.tensor([one.token_ids[-1] for one in sequences])
    for _ in range(num_steps):
        if is_late:
            held = [one.token_ids.pop() if len(one.token_ids) > 1 else None for one in sequences]
        logits = torch.stack([logits_at(one, length) for one, length in zip(sequences, lengths, strict=True)])
        pending = sampler.launch(logits, sequences, positions=list(lengths), previous=tokens)
        if is_late:
            for one, token in zip(sequences, held, strict=True):
                if token is not None:
                    one.token_ids.append(token)
        steps.append(pending.wait())
        tokens = pending.token_ids
        for i, (one, result) in enumerate(zip(sequences, steps[-1], strict=True)):
            if isinstance(result, SampledToken):
                one.token_ids.append(result.token_id)
                lengths[i] += 1
    return steps


def token_of(result: SampledToken | RowError) -> int:
    assert isinstance(result, SampledToken), result
    return result.token_id


def expected_scores(logits: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...] = ()) -> Tensor:
    """What is drawn from, float64[V], of float32[V]: by plain rules, and transformers' own processors."""
    params, scores = sequence.params, logits.double().clone()
    width = len(scores)
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(width, dtype=torch.bool)
        allowed[[i for i in params.allowed_token_ids if i < width]] = True
        scores[~allowed] = -torch.inf
    scores[[i for i in banned_tokens(sequence, eos_token_ids) if i < width]] = -torch.inf
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    row, known = scores.unsqueeze(0), torch.tensor([sequence.token_ids])
    if params.repetition_penalty != 1:
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(known, row)
    generated = sequence.token_ids[sequence.num_prompt_tokens :]
    for token_id in set(generated):
        row[0, token_id] -= params.frequency_penalty * generated.count(token_id) + params.presence_penalty
    if params.temperature == 0:
        return row[0]
    row = TemperatureLogitsWarper(float(params.temperature))(known, row)
    if params.min_p > 0:
        row = MinPLogitsWarper(params.min_p)(known, row)
    if params.top_k > 0:
        row = TopKLogitsWarper(params.top_k)(known, row)
    if params.top_p < 1:
        row = TopPLogitsWarper(params.top_p)(known, row)
    return row[0]


def noise_of(seed: int, position: int, width: int) -> Tensor:
    """float32[V]."""
    keys = row_keys(mix_seeds(torch.tensor([seed])), torch.tensor([position]))
    return gumbel_noise(keys, token_hashes(torch.arange(width, dtype=torch.int32).unsqueeze(0)))[0]


def expected_token(logits: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...] = ()) -> int | None:
    """Of one row alone; None if nothing is left."""
    scores = expected_scores(logits, sequence, eos_token_ids)
    if scores.max() == -torch.inf:
        return None
    if sequence.params.temperature > 0:
        assert sequence.params.seed is not None
        scores = scores + noise_of(sequence.params.seed, len(sequence.token_ids), len(scores))
    return int(scores.argmax())
