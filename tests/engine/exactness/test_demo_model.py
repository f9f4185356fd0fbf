"""The demo model in float32: its tokens do not depend on how the engine goes about it, and shared prefixes are cheap.

The model is loaded once, in this process. It is a real one, whose numbers round otherwise in batches of another shape:
what is shown for tiny models in `test_schedules.py` is shown here where it matters.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from tests.engine.exactness.serving import Answer, Case, Serving, a_case, alone, assert_same
from trio_llm.config import EngineConfig
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.engine.models.base import Model
from trio_llm.engine.models.load import load_model
from trio_llm.engine.models.locate import locate_model
from trio_llm.engine.worker.kv_cache import CachePlan
from trio_llm.frontend.requests.output.parallel_sampling import fan_out
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 8
NUM_BLOCKS = 64
TIGHT_BLOCKS = 5

STORY = (
    "Once upon a time there was a small fox who lived at the edge of a large forest. Every morning the fox went down "
    "to the river to look at its own face in the water, and every morning it found that the water was a little colder "
    "than the day before, so that it had to think about the winter, and about all the"
)
CHOICES = SamplingParams(n=4, seed=20, max_tokens=MAX_TOKENS, ignore_eos=True, top_p=0.95)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return locate_model(EngineConfig(), lambda *_: None)


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Model:
    return load_model(model_dir, dtype="float32", device=torch.device("cpu"))


def executor_of(model: Model, num_blocks: int) -> TorchExecutor:
    model_dir = str(locate_model(EngineConfig(), lambda *_: None))
    cache = CachePlan(num_blocks, max_model_len=32 * min(num_blocks, 36))
    return TorchExecutor(model, cache, model_dir=model_dir, max_num_seqs=64)


@pytest.fixture(scope="module")
def executor(model: Model) -> TorchExecutor:
    return executor_of(model, NUM_BLOCKS)


@pytest.fixture(scope="module")
def cases(model_dir: Path) -> list[Case]:
    """Greedy ones, with log-probabilities that show near ties; four choices for the story, each as its own request."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    story, bread, primes = (
        tokenizer.encode(text).ids for text in (STORY, "To bake bread you need", "A list of primes: 2, 3, 5,")
    )
    story = story[:62]  # two blocks but for two tokens: each answer needs a third
    greedy = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2}
    options = msgspec.structs.asdict(CHOICES) | {"n": 1}
    return [
        a_case("greedy story", story, **greedy),
        a_case("greedy with penalties", bread, **greedy, repetition_penalty=1.2, frequency_penalty=0.5),
        a_case("sampled with everything", primes, seed=3, temperature=0.8, top_k=40, min_p=0.02, presence_penalty=0.5,
               logit_bias={198: -5.0}, min_tokens=5, max_tokens=MAX_TOKENS, bad_words_token_ids=[[260], [28, 216]]),
        *(a_case(f"seed {seed}", story, **{**options, "seed": seed}) for seed in range(20, 24)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def reference(executor: TorchExecutor, cases: list[Case]) -> list[Answer]:
    answers = alone(executor, cases)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(cases), "a model that repeats itself"
    return answers


def test_batched_and_found_in_the_cache_it_gives_the_tokens_of_each_request_alone(
    executor: TorchExecutor, cases: list[Case], reference: list[Answer]
) -> None:
    serving = Serving(executor)

    cold = serving.serve(cases)
    warm = serving.serve([case.renamed(f"{case.request.request_id} again") for case in cases])

    assert_same(cold, reference, cases)
    assert_same(warm, reference, cases)
    assert warm[0].num_cached_tokens == 32


def test_in_chunks_and_with_a_step_launched_ahead_it_gives_the_same_tokens(
    executor: TorchExecutor, cases: list[Case], reference: list[Answer]
) -> None:
    serving = Serving(executor, run_ahead=1, max_num_batched_tokens=40, max_num_seqs=8, enable_prefix_caching=False)

    assert_same(serving.serve(cases), reference, cases)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_with_so_few_blocks_that_requests_preempt_each_other_it_gives_the_same_tokens(
    model: Model, cases: list[Case], reference: list[Answer], run_ahead: int
) -> None:
    serving = Serving(executor_of(model, TIGHT_BLOCKS), run_ahead=run_ahead)

    assert_same(serving.serve(cases), reference, cases)
    assert serving.num_preempted > 0


def test_four_choices_are_four_requests_with_the_seeds_that_follow(
    executor: TorchExecutor, cases: list[Case], reference: list[Answer]
) -> None:
    prompt = cases[0].request.prompt_token_ids
    children = [Case(one) for one in fan_out(EngineCoreRequest("n", prompt, CHOICES))]

    assert_same(Serving(executor).serve(children), reference[-4:], children)


def test_it_goes_on_after_the_tokens_of_an_earlier_engine_as_if_nothing_had_happened(
    executor: TorchExecutor, cases: list[Case], reference: list[Answer]
) -> None:
    """All of them at once, each after another number of tokens."""
    resumed = [
        Case(msgspec.structs.replace(case.request, output_token_ids=answer.token_ids[: 1 + i]))
        for i, (case, answer) in enumerate(zip(cases, reference, strict=True))
    ]

    assert_same(Serving(executor).serve(resumed), reference, resumed)


def test_of_a_prefix_of_1024_tokens_each_request_after_the_first_computes_its_tail_and_a_block_at_most(
    executor: TorchExecutor, cases: list[Case]
) -> None:
    words = cases[0].request.prompt_token_ids
    prefix = (words * (1024 // len(words) + 1))[:1024]
    serving = Serving(executor)

    tails = [words[i : 2 * i + 1] for i in range(32)]  # 1 to 32 tokens
    answers = [
        serving.serve_alone(a_case(str(i), prefix + tail, temperature=0, max_tokens=1)) for i, tail in enumerate(tails)
    ]

    assert answers[0].num_prompt_tokens == 1025
    for answer, tail in zip(answers[1:], tails[1:], strict=True):
        assert answer.num_prompt_tokens <= executor.info.block_size + len(tail)
        assert answer.num_prompt_tokens + answer.num_cached_tokens == 1024 + len(tail)
