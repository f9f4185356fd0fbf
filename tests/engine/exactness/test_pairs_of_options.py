"""Every pair of options through the whole engine: none ends it, and each request gets what it gets alone.

On a tiny model, through the wire's messages, with a step launched ahead or not; among plain requests that must not
notice. What an option does is tested in `tests/engine/sampling`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.engine.exactness.serving import Answer, Case, Serving, a_case, alone, assert_same
from tests.engine.executor.test_torch_executor import make_prompt
from tests.support.tiny_models import load, save_model
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue, EngineCoreRequest

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 8

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {3: 5.0, 7: -100.0, 96: 2.0, 100_000: 1.0}},
    "allowed": {"allowed_token_ids": (2, *range(3, 60), 100_000)},
    "bad_words": {"bad_words_token_ids": [[9], [8, 12], [3, 4, 20], *[[7, i] for i in range(30, 60)]]},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": tuple(range(40, 80))},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 20},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "recovered": {"output_token_ids": [5, 9, 8]},
    "session": {"resumable": True},
    "salt": {"cache_salt": "a"},
    "priority": {"priority": -1},
}
"""Options of the sampler, and options of a request that change how it is scheduled."""

EXCLUDED = {("prompt_logprobs", "session")}
"""Refused, see `test_core.py`."""


def fields_of(names: tuple[str, ...]) -> dict[str, Any]:
    """Fields of all these options; if two set the same field, the first one's value counts."""
    fields: dict[str, Any] = {}
    for name in names:
        fields = OPTIONS[name] | fields
    return fields


def make_case(number: int, names: tuple[str, ...]) -> Case:
    prompt = make_prompt(1 + (11 * number) % 45)
    case = a_case(" and ".join(names), prompt, **{"seed": number, "max_tokens": MAX_TOKENS, **fields_of(names)})
    if not case.request.resumable:
        return case
    request = case.request
    inputs = (Continue(request.request_id, make_prompt(5), request.params, request.bad_words_token_ids),)
    return Case(request, inputs)


def make_cases() -> list[Case]:
    """Each option alone, each pair, and all that go together."""
    pairs = [pair for pair in itertools.combinations(OPTIONS, 2) if pair not in EXCLUDED]
    most = tuple(name for name in OPTIONS if name not in ("greedy", "session"))
    chosen = [*((name,) for name in OPTIONS), *pairs, most, ("greedy", *most)]
    return [make_case(number, names) for number, names in enumerate(chosen)]


def make_neighbours() -> list[Case]:
    return [
        a_case(f"neighbour {i}", make_prompt(20 + i), seed=i, temperature=i % 2, max_tokens=40, ignore_eos=True)
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> TorchExecutor:
    return load(save_model(tmp_path_factory.mktemp("model")), num_gpu_blocks_override=256)


@pytest.fixture(scope="module")
def reference(executor: TorchExecutor) -> list[Answer]:
    return alone(executor, [*make_neighbours(), *make_cases()])


def test_an_option_changes_what_some_requests_get_or_how(executor: TorchExecutor) -> None:
    """An option that changes nothing here would prove nothing."""

    def tokens_with(**fields: Any) -> list[list[int]]:
        cases = [
            a_case(f"seed {i}", make_prompt(9), **{"seed": i, "max_tokens": MAX_TOKENS, **fields}) for i in range(20)
        ]
        answers = Serving(executor).serve(cases)
        return [[*answer.token_ids, len(answer.logprobs), len(answer.prompt_logprobs)] for answer in answers]

    plain = tokens_with()
    for name, fields in OPTIONS.items():
        if name not in ("session", "salt", "priority"):  # these change no token of the first answer
            assert tokens_with(**fields) != plain, name


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 12}], ids=["wide", "narrow"])
def test_no_pair_ends_the_engine_or_changes_what_itself_or_a_neighbour_gets(
    executor: TorchExecutor, reference: list[Answer], run_ahead: int, settings: dict[str, int]
) -> None:
    cases = [*make_neighbours(), *make_cases()]
    serving = Serving(executor, run_ahead=run_ahead, **settings)

    got = serving.serve(cases)

    assert_same(got, reference, cases)
    sessions = [case.request.request_id for case in cases if case.request.resumable]
    serving.abort(sessions)
    assert serving.is_empty


def test_a_request_that_its_options_leave_nothing_ends_alone(executor: TorchExecutor) -> None:
    neighbours = make_neighbours()
    hopeless = [
        a_case("allowed and banned", [1], allowed_token_ids=(9,), bad_words_token_ids=[[9]]),
        a_case("only ends", [1], allowed_token_ids=(2,), min_tokens=3),
        a_case("only unknown ones", [1], allowed_token_ids=(100_000,), temperature=0),
    ]
    for run_ahead in (0, 1):
        got = Serving(executor, run_ahead=run_ahead).serve([*hopeless, *neighbours])

        assert all("leave no token" in (answer.error or "") for answer in got[:3])
        assert_same(got[3:], alone(executor, neighbours), neighbours)


def test_what_the_wire_lets_through_is_known_to_the_matrix() -> None:
    """A new option, or a new field of the request, belongs into the table."""
    default = EngineCoreRequest("a", [1], SamplingParams())
    used = {name for fields in OPTIONS.values() for name in fields} | {"seed", "max_tokens"}
    of_front_end = {"stop", "include_stop_str_in_output", "skip_special_tokens", "bad_words", "output_kind", "n"}
    of_front_end |= {"spaces_between_special_tokens"}
    elsewhere = {"request_id", "prompt_token_ids", "params", "deadline_s", "num_earlier_tokens", "pooling_params"}

    known = used | of_front_end | elsewhere
    assert {*SamplingParams.__struct_fields__, *default.__struct_fields__} == known
