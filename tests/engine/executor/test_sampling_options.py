"""Options of sampling in the executor with the real scheduler: against transformers, preempted, and in sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.executor.test_torch_executor import answers, make_prompt, make_scheduler
from tests.support.sequences import make_sequence
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue

MAX_TOKENS = 40

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 2, "min_tokens": 20},
    {"temperature": 0, "frequency_penalty": 0.7, "logit_bias": {5: 4.0, 6: -4.0}},
    {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_p": 0.02, "top_k": 40},
    {"min_p": 0.1, "temperature": 1.5},
    {"temperature": 0},
]


def make_rows() -> list[Sequence]:
    return [
        make_sequence(str(i), make_prompt(20 + i), SamplingParams(seed=i, max_tokens=MAX_TOKENS, **fields))
        for i, fields in enumerate(OPTIONS)
    ]


@pytest.mark.parametrize(
    ("fields", "generation"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {5: 4.0, 6: -4.0}}, {"sequence_bias": [[[5], 4.0], [[6], -4.0]]}),
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
    ],
)
def test_greedy_with_an_option_is_what_transformers_generates(
    fields: dict[str, Any], generation: dict[str, Any], executor: TorchExecutor, llama_dir: Path
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([make_prompt(33)])
    mask = torch.ones_like(ids)
    out = oracle.generate(
        ids, attention_mask=mask, pad_token_id=0, max_new_tokens=MAX_TOKENS, do_sample=False, **generation
    )

    params = SamplingParams(temperature=0, seed=0, max_tokens=MAX_TOKENS, **fields)

    assert answers(executor, [make_sequence("a", make_prompt(33), params)]) == [out[0, ids.shape[1] :].tolist()]


def test_rows_with_options_get_the_same_alone_together_in_chunks_and_preempted(executor: TorchExecutor) -> None:
    alone = [answers(executor, [one])[0] for one in make_rows()]
    tight = make_scheduler(executor, num_blocks=6)

    assert answers(executor, make_rows()) == alone
    assert answers(executor, make_rows(), make_scheduler(executor, budget=9)) == alone
    assert answers(executor, make_rows(), tight) == alone
    assert tight.stats().num_preempted > 0


def test_penalties_of_a_sessions_answers_count_each_answer_for_itself(executor: TorchExecutor) -> None:
    params = SamplingParams(
        temperature=0, seed=0, max_tokens=12, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.2
    )
    inputs = [make_prompt(20), make_prompt(3), make_prompt(1)]
    scheduler = make_scheduler(executor)
    session = make_sequence("session", inputs[0], params, is_resumable=True)
    scheduler.add(session)

    for number, token_ids in enumerate(inputs):
        if number > 0:
            assert scheduler.continue_session(Continue("session", token_ids, params)) is None
        before = list(session.token_ids)
        while plan := scheduler.schedule():
            scheduler.commit(plan, executor.execute(plan))

        assert [session.token_ids[len(before) :]] == answers(executor, [make_sequence("alone", before, params)])
