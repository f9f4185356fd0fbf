"""However the engine goes about it, a request gets what it gets alone: tokens, reasons and log-probabilities.

Requests that between them use every option, by every way of serving them, on tiny models in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.exactness.serving import Answer, Case, Serving, a_case, alone, assert_same
from tests.engine.executor.test_torch_executor import make_prompt
from tests.support.tiny_models import CONFIGS, load, save_model
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.frontend.requests.output.parallel_sampling import fan_out
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue, EngineCoreRequest

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["llama with grouped queries", "gemma2 with soft caps and mixed windows"]
MAX_TOKENS = 24
TIGHT_BLOCKS = 6

SHARED = make_prompt(64)
"""Two blocks that several prompts begin with."""
BAD_WORDS = [[5], [17, 30], [8, 9, 10]]


def a_session(request_id: str, **fields: Any) -> Case:
    first = a_case(request_id, make_prompt(33), resumable=True, max_tokens=6, **fields).request
    later = [
        SamplingParams(temperature=0, seed=0, max_tokens=5, repetition_penalty=1.3),
        SamplingParams(seed=8, max_tokens=5, frequency_penalty=1, min_tokens=3, logprobs=1),
    ]
    inputs = [
        Continue(request_id, make_prompt(2 + 30 * i), params, BAD_WORDS[:1] if i else [])
        for i, params in enumerate(later)
    ]
    return Case(first, tuple(inputs))


def make_cases() -> list[Case]:
    # Far enough to need a block more than they began with, so that a small cache makes them preempt each other.
    long: dict[str, Any] = {"max_tokens": 36, "ignore_eos": True}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    return [
        a_case("greedy", make_prompt(40), **greedy, logprobs=2),
        a_case("greedy that ends by itself", make_prompt(7), temperature=0, max_tokens=60),
        a_case("greedy with penalties", make_prompt(33), **greedy, repetition_penalty=1.3, presence_penalty=0.4),
        a_case("greedy with counts", make_prompt(1), **greedy, frequency_penalty=0.7, min_tokens=20),
        a_case("greedy, edited", make_prompt(31), **greedy, logit_bias={5: 4.0, 6: -100.0}, stop_token_ids=(11, 12)),
        a_case("greedy among few", make_prompt(9), **greedy, allowed_token_ids=tuple(range(3, 30))),
        a_case("greedy, scored", make_prompt(70), **greedy, prompt_logprobs=3, logprobs=0),
        a_case("sampled", make_prompt(40), **long, seed=1),
        a_case("sampled from the top", [*SHARED, 4], **long, seed=2, temperature=0.7, top_k=20, top_p=0.9),
        a_case("sampled from a nucleus", [*SHARED, 4, 7], **long, seed=-3, top_p=0.8, logprobs=5),
        a_case("sampled above a share", SHARED, **long, seed=2**63 - 1, temperature=1.4, min_p=0.05),
        a_case("sampled with everything", make_prompt(20), seed=4, temperature=1.1, top_k=60, top_p=0.95, min_p=0.01,
               presence_penalty=-0.5, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={20: 1.5}, logprobs=3,
               prompt_logprobs=1, min_tokens=10, stop_token_ids=(21, 22, 23, 24), max_tokens=MAX_TOKENS,
               allowed_token_ids=tuple(range(3, 90)), bad_words_token_ids=BAD_WORDS),
        a_case("sampled, without words", make_prompt(30), **long, seed=5, bad_words_token_ids=BAD_WORDS),
        a_case("urgent", make_prompt(50), **long, seed=6, priority=-1),
        a_case("salted", [*SHARED, 4], **long, seed=7, cache_salt="salt"),
        a_session("session"),
        a_session("sampled session", seed=9, presence_penalty=1.0),
    ]  # fmt: skip


FRONT_END = {
    "bad_words",  # in tokens: a field of the request
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "n",  # see the test of n
}
"""Fields of SamplingParams that the engine does not read."""


def test_the_cases_use_every_option_that_the_engine_knows() -> None:
    default = SamplingParams(seed=0, max_tokens=16)
    used = {
        name
        for case in make_cases()
        for name in SamplingParams.__struct_fields__
        if getattr(case.request.params, name) != getattr(default, name)
    }

    assert used == set(SamplingParams.__struct_fields__) - FRONT_END


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS[request.param])


@pytest.fixture(scope="module")
def executor(folder: Path) -> TorchExecutor:
    return load(folder)


@pytest.fixture(scope="module")
def tight(folder: Path) -> TorchExecutor:
    """The same model with blocks for two or three of the cases."""
    return load(folder, num_gpu_blocks_override=TIGHT_BLOCKS)


@pytest.fixture(scope="module")
def reference(executor: TorchExecutor) -> list[Answer]:
    return alone(executor, make_cases())


@pytest.fixture(params=[0, 1], ids=["step by step", "run ahead"])
def run_ahead(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_each_case_has_an_answer_and_no_two_are_equal(reference: list[Answer]) -> None:
    assert [answer.error for answer in reference] == [None] * len(reference)
    assert len({tuple(answer.token_ids) for answer in reference}) == len(reference)
    reasons = {reason for answer in reference for reason, _ in answer.ends}
    assert reasons == {"stop", "length"}


def test_in_one_batch(executor: TorchExecutor, reference: list[Answer], run_ahead: int) -> None:
    serving = Serving(executor, run_ahead=run_ahead)

    assert_same(serving.serve(make_cases()), reference, make_cases())


def test_in_batches_that_change_all_the_time(executor: TorchExecutor, reference: list[Answer], run_ahead: int) -> None:
    serving = Serving(executor, run_ahead=run_ahead, max_num_seqs=5)

    assert_same(serving.serve(make_cases(), steps_between=2), reference, make_cases())


def test_in_chunks(executor: TorchExecutor, reference: list[Answer], run_ahead: int) -> None:
    serving = Serving(executor, run_ahead=run_ahead, max_num_batched_tokens=11, max_num_seqs=6)

    assert_same(serving.serve(make_cases()), reference, make_cases())


def test_with_all_prompts_in_the_cache(executor: TorchExecutor, reference: list[Answer], run_ahead: int) -> None:
    serving = Serving(executor, run_ahead=run_ahead, max_num_seqs=4)
    serving.serve(make_cases())

    again = serving.serve([case.renamed(f"again {case.request.request_id}") for case in make_cases()])

    assert_same(again, reference, make_cases())
    for answer, case in zip(again, make_cases(), strict=True):
        is_scored = case.request.params.prompt_logprobs is not None
        assert (answer.num_cached_tokens > 0) == (len(case.request.prompt_token_ids) > 32 and not is_scored)


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_with_so_few_blocks_that_they_preempt_each_other(
    tight: TorchExecutor, reference: list[Answer], run_ahead: int, keeps_cache: bool
) -> None:
    serving = Serving(tight, run_ahead=run_ahead, enable_prefix_caching=keeps_cache)

    assert_same(serving.serve(make_cases()), reference, make_cases())
    assert serving.num_preempted > 0


def test_preempted_in_chunks(tight: TorchExecutor, reference: list[Answer], run_ahead: int) -> None:
    serving = Serving(tight, run_ahead=run_ahead, max_num_batched_tokens=9, max_num_seqs=5)

    assert_same(serving.serve(make_cases()), reference, make_cases())
    assert serving.num_preempted > 0


def test_going_on_after_tokens_that_an_earlier_engine_gave(
    executor: TorchExecutor, reference: list[Answer], run_ahead: int
) -> None:
    cases, expected = [], []
    for i, (case, answer) in enumerate(zip(make_cases(), reference, strict=True)):
        if not case.inputs:
            given = answer.token_ids[: min(1 + i, len(answer.token_ids) - 1)]
            cases.append(Case(msgspec.structs.replace(case.request, output_token_ids=given)))
            expected.append(answer)

    assert_same(Serving(executor, run_ahead=run_ahead).serve(cases), expected, cases)


def test_n_choices_are_n_requests_with_the_seeds_that_follow(executor: TorchExecutor, run_ahead: int) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=12, ignore_eos=True, top_p=0.95, logprobs=1)
    children = [Case(one) for one in fan_out(EngineCoreRequest("n", make_prompt(40), params))]
    singles = [
        a_case(f"seed {seed}", make_prompt(40), seed=seed, max_tokens=12, ignore_eos=True, top_p=0.95, logprobs=1)
        for seed in range(11, 15)
    ]
    expected = alone(executor, singles)

    assert len({tuple(answer.token_ids) for answer in expected}) == 4
    assert_same(Serving(executor, run_ahead=run_ahead).serve(children), expected, children)
