"""Log-probabilities of prompts by the torch executor: those of the whole sequence at once, however it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.executor.test_torch_executor import GREEDY, answers, make_prompt, make_scheduler
from tests.support.sequences import make_sequence
from tests.support.tiny_models import CONFIGS, VOCABULARY, load, save_model
from trio_llm.engine.executor import prompt_logprobs
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import LogprobRow

TOP = 5
GREEDY_ONE = SamplingParams(temperature=0, seed=0, max_tokens=1)


def scoring(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "seed": 0, "max_tokens": 3, "prompt_logprobs": TOP} | fields))


def scores(
    executor: TorchExecutor, sequences: list[Sequence], scheduler: Scheduler | None = None
) -> dict[str, list[LogprobRow]]:
    """Run sequences to their end, together; the rows of each prompt, which must come in order and before any token."""
    scheduler = scheduler or make_scheduler(executor)
    for sequence in sequences:
        scheduler.add(sequence)
    found: dict[str, list[LogprobRow]] = {sequence.request_id: [] for sequence in sequences}
    for _ in range(1000):
        if (plan := scheduler.schedule()) is None:
            break
        for row in scheduler.commit(plan, executor.execute(plan)):
            if row.prompt_logprobs is not None:
                assert row.new_token_ids == []
                assert row.start == 0
                assert row.prompt_logprobs_start == len(found[row.request_id]) + 1
                found[row.request_id] += row.prompt_logprobs
            elif row.start == 0 and not row.error and row.request_id in found:
                wanted = next(s for s in sequences if s.request_id == row.request_id)
                if wanted.params.prompt_logprobs is not None:
                    assert len(found[row.request_id]) == wanted.num_prompt_tokens - 1
        scheduler.check()
    return found


def expected_rows(folder: Path, prompt: list[int]) -> list[LogprobRow]:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logprobs = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0], 1)
    rows = []
    for position in range(1, len(prompt)):
        row, own = logprobs[position - 1], prompt[position]
        best = row.topk(TOP)
        rows.append(
            LogprobRow(
                [own, *best.indices.tolist()], [row[own].item(), *best.values.tolist()], int((row > row[own]).sum()) + 1
            )
        )
    return rows


def assert_close(rows: list[LogprobRow], expected: list[LogprobRow]) -> None:
    assert [row.token_ids for row in rows] == [row.token_ids for row in expected]
    assert [row.sampled_rank for row in rows] == [row.sampled_rank for row in expected]
    for row, one in zip(rows, expected, strict=True):
        assert row.logprobs == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_they_are_those_of_the_whole_sequence_at_once_whole_and_in_chunks(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, CONFIGS[kind])
    prompt = make_prompt(70)
    expected = expected_rows(folder, prompt)
    executor = load(folder)

    whole = scores(executor, [make_sequence("a", prompt, scoring())])
    chunked = scores(executor, [make_sequence("a", prompt, scoring())], make_scheduler(executor, budget=11))

    assert_close(whole["a"], expected)
    assert_close(chunked["a"], expected)


def test_logits_are_made_in_slices_that_do_not_show(
    executor: TorchExecutor, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(50)
    monkeypatch.setattr(prompt_logprobs, "_SLICE_BYTES", 7 * 4 * VOCABULARY)
    rows = watch_the_head(executor, monkeypatch)

    assert_close(scores(executor, [make_sequence("a", prompt, scoring())])["a"], expected_rows(llama_dir, prompt))
    assert max(rows) == 7


def watch_the_head(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the model's head runs over, call by call from now on."""
    rows: list[int] = []
    make_logits = executor._model.logits

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return make_logits(hidden)

    monkeypatch.setattr(executor._model, "logits", watch)
    return rows


def test_prompts_of_one_step_are_scored_together_and_no_other_rows_are(
    executor: TorchExecutor, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [make_prompt(length) for length in (9, 1, 14, 20)]
    params = [scoring(max_tokens=1), scoring(max_tokens=1), scoring(max_tokens=1, prompt_logprobs=0), GREEDY_ONE]
    sequences = [
        make_sequence(str(i), prompt, one) for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    rows = watch_the_head(executor, monkeypatch)

    found = scores(executor, sequences)

    assert sorted(rows) == [4, 8 + 0 + 13], "four first tokens, and the prompts that asked"
    assert_close(found["0"], expected_rows(llama_dir, prompts[0]))
    assert [row.token_ids for row in found["2"]] == [[token] for token in prompts[2][1:]]
    assert (found["1"], found["3"]) == ([], [])


def test_a_preempted_sequence_has_each_of_them_once(executor: TorchExecutor, llama_dir: Path) -> None:
    prompts = [make_prompt(30 + i) for i in range(4)]
    scheduler = make_scheduler(executor, num_blocks=6)
    params = scoring(max_tokens=60, ignore_eos=True)

    found = scores(executor, [make_sequence(str(i), prompt, params) for i, prompt in enumerate(prompts)], scheduler)

    assert scheduler.stats().num_preempted > 0
    for i, prompt in enumerate(prompts):
        assert_close(found[str(i)], expected_rows(llama_dir, prompt))


def test_neither_tokens_nor_neighbours_change(executor: TorchExecutor) -> None:
    prompts = [make_prompt(length) for length in (40, 1, 33)]
    plain = [make_sequence(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    scored = [
        make_sequence("0", prompts[0], scoring(max_tokens=24)),
        make_sequence("1", prompts[1], GREEDY),
        make_sequence("2", prompts[2], scoring(max_tokens=24, prompt_logprobs=0)),
    ]

    assert answers(executor, scored) == answers(executor, plain)


def test_a_prompt_of_one_token_has_none_and_alternatives_are_as_many_as_asked_for(executor: TorchExecutor) -> None:
    found = scores(
        executor,
        [make_sequence("one", [5], scoring()), make_sequence("own alone", [5, 6, 7], scoring(prompt_logprobs=0))],
    )

    assert found["one"] == []
    assert [row.token_ids for row in found["own alone"]] == [[6], [7]]


def test_greedy_with_allowed_ids_takes_the_likeliest_of_them_at_every_step(
    executor: TorchExecutor, llama_dir: Path
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32, attn_implementation="eager")
    allowed, prompt = [11, 12, 40, 41, 60], make_prompt(20)
    expected = list(prompt)
    for _ in range(8):
        with torch.inference_mode():
            row = oracle(torch.tensor([expected])).logits[0, -1]
        expected.append(max(allowed, key=lambda token: row[token].item()))

    params = SamplingParams(temperature=0, seed=0, max_tokens=8, allowed_token_ids=tuple(allowed))

    assert answers(executor, [make_sequence("a", prompt, params)]) == [expected[20:]]


def test_greedy_with_bad_words_is_what_transformers_generates(executor: TorchExecutor, llama_dir: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32, attn_implementation="eager")
    oracle.generation_config.pad_token_id = 0
    prompt = make_prompt(20)
    free = answers(executor, [make_sequence("free", prompt, GREEDY)])[0]
    bad_words = [[free[0]], free[2:4]]
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, bad_words_ids=bad_words
    )

    bound = answers(executor, [make_sequence("bound", prompt, GREEDY, bad_words=bad_words)])[0]

    assert bound == out[0, 20:].tolist()
    assert bound != free
