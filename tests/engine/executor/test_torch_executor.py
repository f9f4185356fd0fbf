"""The executor with the real scheduler, against transformers' own generation."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.sequences import make_sequence
from tests.support.tiny_models import CONFIGS, EOS, VOCABULARY, load, mamba_config, save_model
from trio_llm.config import EngineConfig
from trio_llm.engine.executor import torch_executor
from trio_llm.engine.executor.base import LaunchedStep
from trio_llm.engine.executor.torch_executor import TorchExecutor, _choose_device, _count_sharing, load_torch
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, SampledToken, ScheduledChunk, StepPlan
from trio_llm.engine.worker.host_batch import HostBatch, lay_out
from trio_llm.errors import EngineStartupError
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue

MAX_TOKENS = 24
LENGTHS = (1, 7, 32, 33, 70)
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=MAX_TOKENS)


def make_prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * length + i) % (VOCABULARY - 3) + 3 for i in range(length)]


def make_scheduler(executor: TorchExecutor, *, budget: int = 512, num_blocks: int | None = None) -> Scheduler:
    info = executor.info
    num_blocks = num_blocks or info.num_blocks
    return Scheduler(
        SchedulerLimits(
            num_blocks=num_blocks,
            block_size=info.block_size,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=min(info.max_model_len, num_blocks * info.block_size),
            eos_token_ids=info.eos_token_ids,
            logits_width=info.logits_width,
        )
    )


def answers(
    executor: TorchExecutor, sequences: list[Sequence], scheduler: Scheduler | None = None, *, run_ahead: int = 0
) -> list[list[int]]:
    """Run sequences to their end, together; what was generated for each."""
    scheduler = scheduler or make_scheduler(executor)
    for sequence in sequences:
        scheduler.add(sequence)
    in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
    for _ in range(2000):
        if plan := scheduler.schedule():
            in_flight.append((plan, executor.launch(plan)))
        elif not in_flight:
            break
        if plan is None or len(in_flight) > run_ahead:
            oldest, launched = in_flight.popleft()
            scheduler.commit(oldest, launched.wait())
            scheduler.check()
    assert not scheduler.has_unfinished
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def expected_greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    return [int(i) for i in out[0, len(prompt) :]]


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_answers_are_those_of_transformers_whole_and_in_chunks(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, CONFIGS[kind])
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    oracle.generation_config.pad_token_id = 0
    prompts = [make_prompt(length) for length in LENGTHS]
    expected = [expected_greedy(oracle, prompt) for prompt in prompts]
    executor = load(folder)

    whole = answers(executor, [make_sequence(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)])
    chunked = answers(
        executor,
        [make_sequence(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)],
        make_scheduler(executor, budget=11),
    )

    assert whole == expected
    assert chunked == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "a model that repeats itself proves nothing"


@pytest.mark.parametrize("budget", [512, 9])
def test_each_answer_of_a_session_is_that_of_transformers_to_all_tokens_before_it(
    budget: int, executor: TorchExecutor, llama_dir: Path
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32, attn_implementation="eager")
    oracle.generation_config.pad_token_id = 0
    inputs = [make_prompt(40), make_prompt(3), make_prompt(33)]
    scheduler = make_scheduler(executor, budget=budget)
    session = make_sequence("session", inputs[0], GREEDY, is_resumable=True)
    num_computed = 0

    scheduler.add(session)
    for number, token_ids in enumerate(inputs):
        if number > 0:
            assert scheduler.continue_session(Continue("session", token_ids, GREEDY)) is None
        before = list(session.token_ids)
        while plan := scheduler.schedule():
            num_computed += plan.num_tokens
            scheduler.commit(plan, executor.execute(plan))
            scheduler.check()
        assert session.token_ids[len(before) :] == expected_greedy(oracle, before)

    assert num_computed == len(session.token_ids) - 1, "a token was computed twice"


def test_a_preempted_sequence_ends_with_the_same_tokens(executor: TorchExecutor) -> None:
    def fresh() -> list[Sequence]:
        params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)
        return [make_sequence(str(i), make_prompt(30 + i), params) for i in range(4)]

    roomy = answers(executor, fresh())
    scheduler = make_scheduler(executor, num_blocks=6)
    tight = answers(executor, fresh(), scheduler)

    assert scheduler.stats().num_preempted > 0
    assert tight == roomy


@pytest.mark.parametrize("budget", [9, 512])
def test_sampled_tokens_follow_from_the_seed_whatever_else_is_in_the_batch(
    executor: TorchExecutor, budget: int
) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=30, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
    alone = answers(executor, [make_sequence("a", make_prompt(40), params)])[0]

    others = [make_sequence(str(i), make_prompt(10 + i), SamplingParams(seed=i, max_tokens=40)) for i in range(5)]
    together = answers(
        executor, [*others, make_sequence("b", make_prompt(40), params)], make_scheduler(executor, budget=budget)
    )[-1]
    other_seed = answers(
        executor, [make_sequence("c", make_prompt(40), SamplingParams(seed=12, max_tokens=MAX_TOKENS, ignore_eos=True))]
    )[0]

    assert together == alone
    assert other_seed != alone


def test_running_ahead_changes_no_token(executor: TorchExecutor) -> None:
    def fresh() -> list[Sequence]:
        params = [GREEDY, *(SamplingParams(seed=seed, max_tokens=25 + seed) for seed in range(5))]
        return [make_sequence(str(i), make_prompt(5 + 9 * i), one) for i, one in enumerate(params)]

    waiting = answers(executor, fresh())
    for num_blocks in (None, 7):
        scheduler = make_scheduler(executor, budget=40, num_blocks=num_blocks)
        assert answers(executor, fresh(), scheduler, run_ahead=1) == waiting


@pytest.mark.parametrize("budget", [512, 9])
def test_a_prompt_found_in_the_cache_gives_the_tokens_of_one_that_was_computed(
    executor: TorchExecutor, budget: int
) -> None:
    params = [SamplingParams(seed=seed, temperature=0.8, max_tokens=20, ignore_eos=True) for seed in range(4)]
    prompts = [make_prompt(75), make_prompt(75), [*make_prompt(75), 9], make_prompt(75)[:64]]
    cold = [
        answers(executor, [make_sequence("a", prompt, one)])[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    sequences = [
        make_sequence(str(i), prompt, one) for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]

    together = answers(executor, sequences, make_scheduler(executor, budget=budget))

    assert together == cold
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 64, 64, 32]


def test_an_answer_goes_on_after_the_tokens_of_an_earlier_incarnation(executor: TorchExecutor) -> None:
    params = SamplingParams(seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompt = make_prompt(20)
    whole = answers(executor, [make_sequence("a", prompt, params)])[0]

    resumed = Sequence(request_id="b", token_ids=prompt + whole[:10], num_prompt_tokens=len(prompt), params=params)

    assert answers(executor, [resumed])[0] == whole


def test_no_end_token_comes_before_min_tokens_even_if_the_model_wants_it(
    executor: TorchExecutor,
) -> None:
    prompt = make_prompt(12)
    greedy = answers(executor, [make_sequence("a", prompt, SamplingParams(temperature=0, seed=0, max_tokens=8))])[0]
    stop = greedy[2]
    params = SamplingParams(temperature=0, seed=0, max_tokens=8, min_tokens=6, stop_token_ids=(stop,), ignore_eos=True)

    tokens = answers(executor, [make_sequence("b", prompt, params)])[0]

    assert len(tokens) >= 6
    assert stop not in tokens[:6]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("budget", [512, 11])
def test_a_batch_that_is_padded_gives_the_same_tokens(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, budget: int, run_ahead: int
) -> None:
    def fresh() -> list[Sequence]:
        params = [GREEDY, *(SamplingParams(seed=seed, max_tokens=25 + seed, logprobs=2) for seed in range(4))]
        params.append(SamplingParams(temperature=0, seed=0, max_tokens=4, prompt_logprobs=1, presence_penalty=1))
        return [make_sequence(str(i), make_prompt(5 + 9 * i), one) for i, one in enumerate(params)]

    as_they_are = answers(executor, fresh(), make_scheduler(executor, budget=budget), run_ahead=run_ahead)
    padded = []

    def lay_out_padded(*args: Any, pad_rows_to: int, trash_block: int) -> HostBatch:
        padded.append(lay_out(*args, pad_rows_to=40, trash_block=trash_block))
        return padded[-1]

    monkeypatch.setattr(torch_executor, "lay_out", lay_out_padded)

    assert answers(executor, fresh(), make_scheduler(executor, budget=budget), run_ahead=run_ahead) == as_they_are
    assert {len(batch.context) for batch in padded} == {40}


def run_once(executor: TorchExecutor, sequences: list[Sequence]) -> list[SampledToken | PooledVector | RowError]:
    plan = StepPlan(tuple(ScheduledChunk(s, 0, len(s.token_ids), samples=True) for s in sequences))
    return list(executor.execute(plan).sampled)


def test_a_request_that_makes_the_model_compute_nan_fails_alone_and_leaves_nothing_in_its_block(
    tmp_path: Path,
) -> None:
    folder, poison = save_model(tmp_path, CONFIGS["llama with an untied head"]), 50
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    executor = load(folder)
    good = make_sequence("good", [5, 6, 7], GREEDY, block_ids=[1])
    expected = run_once(executor, [good])

    first, second = run_once(executor, [make_sequence("bad", [5, poison, 7, 8, 9], GREEDY, block_ids=[0]), good])
    reused = run_once(executor, [make_sequence("next", [5, 6, 7], GREEDY, block_ids=[0])])

    assert isinstance(first, RowError)
    assert "NaN" in first.message
    assert [second] == expected
    assert reused == expected


def test_a_failed_row_is_reported_as_that_sequences_error_and_its_neighbour_goes_on(tmp_path: Path) -> None:
    folder, poison = save_model(tmp_path, CONFIGS["llama with an untied head"]), 50
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    executor = load(folder)
    expected = answers(executor, [make_sequence("a", [5, 6, 7], GREEDY)])

    bad, good = make_sequence("bad", [5, poison], GREEDY), make_sequence("a", [5, 6, 7], GREEDY)
    result = answers(executor, [bad, good])

    assert bad.finish_reason == "error"
    assert result == [[], *expected]


def test_a_chunk_that_does_not_reach_the_last_token_samples_nothing(executor: TorchExecutor) -> None:
    sequence = make_sequence("a", make_prompt(10), GREEDY, block_ids=[0])

    assert executor.execute(StepPlan((ScheduledChunk(sequence, 0, 6, samples=False),))).sampled == ()


def test_info_describes_what_was_loaded(executor: TorchExecutor, llama_dir: Path) -> None:
    info = executor.info

    assert (info.model_dir, info.device, info.dtype) == (str(llama_dir), "cpu", "float32")
    assert (info.num_blocks, info.block_size, info.max_model_len) == (64, 32, 256)
    assert (info.logits_width, info.eos_token_ids) == (VOCABULARY, (EOS,))
    assert info.tasks == ("generate", "embed", "score")
    assert info.versions["torch"] == torch.__version__


def test_every_end_token_of_both_configurations_counts(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 100_000]}))

    assert load(folder).info.eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize(
    ("num_devices", "devices", "num_sharing"), [(1, [0, 0, 0, 0], 4), (2, [0, 1, 0, 1], 2), (8, [0, 1, 2, 3], 1)]
)
def test_ranks_take_gpus_in_turn(
    num_devices: int, devices: list[int], num_sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)

    assert [_choose_device("auto", index) for index in range(4)] == [torch.device("cuda", one) for one in devices]
    assert _count_sharing(torch.device("cuda", 0), 4) == num_sharing
    assert _choose_device("cpu", 3) == torch.device("cpu")
    assert _count_sharing(torch.device("cpu"), 4) == 4


def test_progress_comes_in_order_and_reaches_its_totals(llama_dir: Path) -> None:
    heard: list[tuple[str, int, int]] = []

    load_torch(
        EngineConfig(model=str(llama_dir), device="cpu", num_gpu_blocks_override=8), lambda *call: heard.append(call)
    )

    assert [phase for phase, done, total in heard if done == total] == ["load", "warm-up"]
    assert heard == sorted(heard)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight is missing": (drop_a_weight, "up_proj"),
    "the weights are cut off": (cut_the_weights, "cannot load"),
    "the configuration is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "it is an encoder-decoder": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'), "has an encoder"
    ),
    "it is quantised": (
        lambda folder: edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised",
    ),
    "its rotary embedding depends on the batch": (
        lambda folder: edit_json(
            folder / "config.json", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
        "rotary",
    ),
    "its code is remote": (
        lambda folder: (folder / "config.json").write_text(
            '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}'
        ),
        "config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_model_that_cannot_be_served_is_refused_with_one_line_that_names_it(fault: str, tmp_path: Path) -> None:
    damage, hint = BROKEN[fault]
    folder = save_model(tmp_path)
    damage(folder)

    with pytest.raises(EngineStartupError) as caught:
        load(folder)

    assert "MODEL" in str(caught.value)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, mamba_config())

    with pytest.raises(EngineStartupError, match=r"MODEL .* cannot be served"):
        load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_asking_for_a_cuda_device_that_is_not_there_names_the_flag(llama_dir: Path) -> None:
    with pytest.raises(EngineStartupError, match="--device"):
        load(llama_dir, device="cuda")
