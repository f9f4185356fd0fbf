"""A row that fails ends its request alone: nothing of it is found in the cache, and no neighbour's token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.exactness.serving import Answer, Case, Serving, a_case, alone, assert_same
from tests.engine.executor.test_torch_executor import make_prompt
from tests.support.tiny_models import CONFIGS, VOCABULARY, load, save_model
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.executor.fake import load_fake
from trio_llm.engine.executor.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

POISON = 50
"""A token whose embedding is NaN."""
OTHERS = tuple(i for i in range(VOCABULARY) if i != POISON)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> TorchExecutor:
    folder: Path = save_model(tmp_path_factory.mktemp("model"), CONFIGS["llama with an untied head"])
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load(folder)


def without_poison(length: int) -> list[int]:
    return [token if token != POISON else 3 for token in make_prompt(length)]


def make_neighbours() -> list[Case]:
    """None of them can sample the poison. Two begin as the poisoned prompts do."""
    return [
        a_case(f"neighbour {i}", without_poison(70 + i if i < 2 else 20 * i), seed=i, temperature=i % 2,
               allowed_token_ids=OTHERS, ignore_eos=True, max_tokens=30, repetition_penalty=1 + i % 3 / 10)
        for i in range(4)
    ]  # fmt: skip


def make_poisoned() -> dict[str, Case]:
    prompt = without_poison(70)
    return {
        "at the end of the prompt": a_case("bad", [*prompt, POISON], max_tokens=20),
        "in the middle of it": a_case("bad", [*prompt, POISON, *prompt], max_tokens=20),
        "generated": a_case("bad", prompt, max_tokens=20, logit_bias={POISON: 100.0}, min_tokens=10),
        "after some tokens": a_case("bad", prompt, max_tokens=20, output_token_ids=[*prompt[:9], POISON]),
    }


@pytest.fixture(scope="module")
def reference(executor: TorchExecutor) -> list[Answer]:
    return alone(executor, make_neighbours())


@pytest.mark.parametrize("budget", [512, 20])
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("where", make_poisoned())
def test_nan_ends_its_request_alone_and_nothing_of_it_is_found(
    executor: TorchExecutor, reference: list[Answer], where: str, run_ahead: int, budget: int
) -> None:
    bad = make_poisoned()[where]
    serving = Serving(executor, run_ahead=run_ahead, max_num_batched_tokens=budget, max_num_seqs=8)

    failed = serving.serve_alone(bad)
    again = serving.serve([case.renamed(f"after, {case.request.request_id}") for case in make_neighbours()[:1]])
    together = serving.serve([bad.renamed("bad again"), *make_neighbours()], steps_between=2)

    assert "NaN" in (failed.error or "")
    assert "NaN" in (together[0].error or "")
    assert again[0].num_cached_tokens == 0, "something of the failed request was found"
    assert_same(again, reference[:1], make_neighbours()[:1])
    assert_same(together[1:], reference, make_neighbours())
    assert serving.is_empty


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_token_out_of_range_ends_its_request_alone_and_nothing_of_it_is_found(run_ahead: int) -> None:
    fake = FakeEngineConfig(faulty_token_prompt=9)
    executor = load_fake(EngineConfig(fake=fake, num_gpu_blocks_override=32), lambda *_: None, model_dir="/m")
    neighbours = [a_case(f"neighbour {i}", [i + 1] * 40, max_tokens=20) for i in range(4)]
    serving = Serving(executor, run_ahead=run_ahead)

    failed, *together = serving.serve([a_case("bad", [9] * 70), *neighbours])
    again = serving.serve_alone(a_case("bad again", [9] * 70))

    assert "outside 0 to" in (failed.error or "")
    assert failed.token_ids == []
    assert again.num_cached_tokens == 0
    assert again.num_prompt_tokens == 70
    assert_same(together, alone(executor, neighbours), neighbours)
    assert serving.is_empty
