"""Vectors by the torch executor, against the hidden states and the classification heads of transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.engine.executor.test_torch_executor import GREEDY, LENGTHS, answers, make_prompt, make_scheduler
from tests.support.one_client import take_answers
from tests.support.sequences import make_sequence
from tests.support.tiny_models import CONFIGS, VOCABULARY, bert_config, load, save_classifier, save_model
from trio_llm.config import EngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.errors import EngineStartupError
from trio_llm.pooling import PoolingKind, PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import NO_SAMPLING, EngineCoreOutput, EngineCoreRequest

PROMPTS = [make_prompt(length) for length in LENGTHS]
CLASSIFY = PoolingParams(task="classify")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def pooling_sequence(name: str, prompt: list[int], params: PoolingParams) -> Sequence:
    return make_sequence(name, prompt, NO_SAMPLING, pooling=params)


def run(executor: TorchExecutor, scheduler: Scheduler) -> dict[str, EngineCoreOutput]:
    """The last row of every sequence."""
    rows = {}
    for _ in range(1000):
        if (plan := scheduler.schedule()) is None:
            break
        rows.update({row.request_id: row for row in scheduler.commit(plan, executor.execute(plan))})
        scheduler.check()
    return rows


def pooled(
    executor: TorchExecutor, prompts: list[list[int]], params: PoolingParams, scheduler: Scheduler | None = None
) -> torch.Tensor:
    """[prompts, numbers], computed together."""
    scheduler = scheduler or make_scheduler(executor)
    for index, prompt in enumerate(prompts):
        scheduler.add(pooling_sequence(str(index), prompt, params))
    rows = run(executor, scheduler)
    return torch.stack([numbers(rows[str(index)]) for index in range(len(prompts))])


def numbers(row: EngineCoreOutput) -> torch.Tensor:
    assert row.pooled is not None, row.error
    return torch.tensor(struct.unpack(f"<{len(row.pooled) // 4}f", row.pooled))


@torch.inference_mode()
def expected_embeddings(folder: Path, kind: PoolingKind, prompts: list[list[int]]) -> torch.Tensor:
    oracle = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    hidden = [oracle(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    return torch.stack([states[-1] if kind == "last" else states.mean(dim=0) for states in hidden])


@torch.inference_mode()
def expected_logits(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    oracle = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # The oracle finds padding by its id: it would misread prompts whose last token has that id.
    oracle.config.pad_token_id = None
    return torch.cat([oracle(torch.tensor([prompt])).logits for prompt in prompts])


@pytest.fixture(scope="module")
def classifier_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"), CONFIGS["llama with grouped queries"], num_labels=3)


@pytest.fixture(scope="module")
def classifier(classifier_dir: Path) -> TorchExecutor:
    return load(classifier_dir)


# ---------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("kind", CONFIGS)
def test_embeddings_are_the_pooled_hidden_states_of_transformers_whole_and_in_chunks(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, CONFIGS[kind])
    executor = load(folder)
    ways: list[PoolingKind] = ["last", "mean"]
    for way in ways:
        expected = expected_embeddings(folder, way, PROMPTS)
        assert expected.var(dim=0).min() > 1e-4, "vectors that are all alike prove nothing"
        scaled = expected / expected.norm(dim=1, keepdim=True)

        whole = pooled(executor, PROMPTS, PoolingParams(pooling=way))
        chunked = pooled(executor, PROMPTS, PoolingParams(pooling=way), make_scheduler(executor, budget=11))
        plain = pooled(executor, PROMPTS, PoolingParams(pooling=way, normalize=False))

        assert torch.allclose(whole, scaled, **CLOSE)
        assert torch.allclose(chunked, scaled, **CLOSE)
        assert torch.allclose(plain, expected, **CLOSE)


@pytest.mark.parametrize("way", ["last", "mean"])
def test_a_vector_does_not_depend_on_the_batch(way: PoolingKind, executor: TorchExecutor) -> None:
    params = PoolingParams(pooling=way)
    together = pooled(executor, PROMPTS, params)

    alone = torch.cat([pooled(executor, [prompt], params) for prompt in PROMPTS])

    assert torch.allclose(together, alone, **CLOSE)


def test_without_a_word_the_last_token_is_what_counts(executor: TorchExecutor) -> None:
    assert torch.equal(
        pooled(executor, PROMPTS, PoolingParams()), pooled(executor, PROMPTS, PoolingParams(pooling="last"))
    )


@pytest.mark.parametrize("budget", [9, 512])
def test_answers_and_vectors_in_the_same_steps_are_those_alone(budget: int, executor: TorchExecutor) -> None:
    prompts = [make_prompt(length) for length in (20, 5, 40)]
    expected = [answers(executor, [make_sequence("alone", prompt, GREEDY)])[0] for prompt in prompts]
    vectors = pooled(executor, prompts, PoolingParams(pooling="mean"))
    scheduler = make_scheduler(executor, budget=budget)

    answering = [make_sequence(f"a{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for i, prompt in enumerate(prompts):
        scheduler.add(answering[i])
        scheduler.add(pooling_sequence(f"p{i}", prompt, PoolingParams(pooling="mean")))
    rows = run(executor, scheduler)

    assert [sequence.token_ids[len(prompts[i]) :] for i, sequence in enumerate(answering)] == expected
    assert torch.allclose(torch.stack([numbers(rows[f"p{i}"]) for i in range(3)]), vectors, **CLOSE)


def test_a_mean_that_is_preempted_half_way_begins_again_and_is_the_same(executor: TorchExecutor) -> None:
    prompt = make_prompt(100)
    expected = pooled(executor, [prompt], PoolingParams(pooling="mean"))[0]
    scheduler = make_scheduler(executor, budget=8, num_blocks=9)
    # Both answers need a third block while the mean is summed up, and one is left.
    params = SamplingParams(temperature=0, seed=0, max_tokens=30, ignore_eos=True)
    scheduler.add(make_sequence("first", make_prompt(50), params))
    scheduler.add(make_sequence("second", make_prompt(60), params))
    mean = pooling_sequence("mean", prompt, PoolingParams(pooling="mean"))
    scheduler.add(mean)

    rows = run(executor, scheduler)

    assert mean.num_preemptions > 0
    assert torch.allclose(numbers(rows["mean"]), expected, **CLOSE)


def test_what_the_cache_has_is_not_computed_for_the_last_token_and_is_for_the_mean(executor: TorchExecutor) -> None:
    prompt, tail = make_prompt(70), make_prompt(9)
    scheduler = make_scheduler(executor)
    ways: list[PoolingKind] = ["last", "mean"]
    for way in ways:
        params = PoolingParams(pooling=way)
        expected = pooled(executor, [prompt, prompt[:64] + tail], params)
        scheduler.add(pooling_sequence(f"{way} before", prompt, params))
        run(executor, scheduler)
        scheduler.add(pooling_sequence(f"{way} same", prompt, params))
        scheduler.add(pooling_sequence(f"{way} other", prompt[:64] + tail, params))
        rows = run(executor, scheduler)

        assert torch.allclose(torch.stack([numbers(row) for row in rows.values()]), expected, **CLOSE)
        assert [row.num_cached_tokens for row in rows.values()] == [64 if way == "last" else 0] * 2


def test_a_prompt_that_fills_the_context_is_pooled(executor: TorchExecutor, llama_dir: Path) -> None:
    prompt = make_prompt(executor.info.max_model_len)

    vector = pooled(executor, [prompt], PoolingParams(normalize=False))

    assert torch.allclose(vector, expected_embeddings(llama_dir, "last", [prompt]), **CLOSE)


def poison(folder: Path, token_id: int) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token_id] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("params", [PoolingParams(), PoolingParams(pooling="mean"), CLASSIFY], ids=str)
def test_a_vector_of_nan_ends_its_request_alone(params: PoolingParams, tmp_path: Path) -> None:
    config, bad_token = CONFIGS["llama with an untied head"], 50
    is_classifier = params.task == "classify"
    folder = save_classifier(tmp_path, config, num_labels=3) if is_classifier else save_model(tmp_path, config)
    poison(folder, bad_token)
    executor = load(folder)
    expected = pooled(executor, [[5, 6, 7]], params)[0]
    scheduler = make_scheduler(executor)

    scheduler.add(pooling_sequence("bad", [5, bad_token, 7], params))
    scheduler.add(pooling_sequence("good", [5, 6, 7], params))
    rows = run(executor, scheduler)

    assert (rows["bad"].finish_reason, rows["bad"].pooled) == ("error", None)
    assert "NaN" in (rows["bad"].error or "")
    assert torch.allclose(numbers(rows["good"]), expected, **CLOSE)
    assert torch.allclose(pooled(executor, [[5, 6, 7]], params)[0], expected, **CLOSE)


# -------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("kind", "num_labels"), [*((kind, 3) for kind in CONFIGS), ("qwen2", 1), ("llama with an untied head", 2)]
)
def test_classes_are_those_of_transformers_whole_and_in_chunks(kind: str, num_labels: int, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, CONFIGS[kind], num_labels=num_labels)
    logits = expected_logits(folder, PROMPTS)
    assert logits.var(dim=0).min() > 1e-4, "classes that are all alike prove nothing"
    expected = logits.sigmoid() if num_labels == 1 else logits.softmax(dim=1)
    executor = load(folder)

    whole = pooled(executor, PROMPTS, CLASSIFY)
    chunked = pooled(executor, PROMPTS, CLASSIFY, make_scheduler(executor, budget=11))

    assert whole.shape == (len(PROMPTS), num_labels)
    assert torch.allclose(whole, expected, **CLOSE)
    assert torch.allclose(chunked, expected, **CLOSE)


@pytest.mark.parametrize("problem", ["regression", "single_label_classification", "multi_label_classification"])
def test_what_the_head_s_numbers_mean_follows_from_the_configuration(
    problem: str, classifier_dir: Path, tmp_path: Path
) -> None:
    for file in classifier_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"problem_type": problem}))
    logits = expected_logits(classifier_dir, PROMPTS)

    found = pooled(load(tmp_path), PROMPTS, CLASSIFY)

    meanings = {
        "regression": logits,
        "single_label_classification": logits.softmax(dim=1),
        "multi_label_classification": logits.sigmoid(),
    }
    assert torch.allclose(found, meanings[problem], **CLOSE)


def test_a_classifier_embeds_too_and_both_go_in_the_same_steps(classifier: TorchExecutor, classifier_dir: Path) -> None:
    embeddings = expected_embeddings(classifier_dir, "mean", PROMPTS)
    classes = expected_logits(classifier_dir, PROMPTS).softmax(dim=1)
    scheduler = make_scheduler(classifier, budget=20)

    for index, prompt in enumerate(PROMPTS):
        scheduler.add(pooling_sequence(f"e{index}", prompt, PoolingParams(pooling="mean", normalize=False)))
        scheduler.add(pooling_sequence(f"c{index}", prompt, CLASSIFY))
    rows = run(classifier, scheduler)

    for index in range(len(PROMPTS)):
        assert torch.allclose(numbers(rows[f"e{index}"]), embeddings[index], **CLOSE)
        assert torch.allclose(numbers(rows[f"c{index}"]), classes[index], **CLOSE)


def test_the_last_token_is_read_whatever_its_id(classifier: TorchExecutor, classifier_dir: Path) -> None:
    prompt = [5, 6, 0]  # 0 is the padding of this model
    expected = expected_logits(classifier_dir, [prompt]).softmax(dim=1)

    assert torch.allclose(pooled(classifier, [prompt], CLASSIFY), expected, **CLOSE)


def test_each_kind_of_model_has_its_tasks_and_refuses_the_others(
    classifier: TorchExecutor, executor: TorchExecutor
) -> None:
    assert classifier.info.tasks == ("embed", "classify")
    assert classifier.info.logits_width == VOCABULARY
    assert executor.info.tasks == ("generate", "embed", "score")

    for model, request in (
        (classifier, EngineCoreRequest("r", [1], NO_SAMPLING)),
        (executor, EngineCoreRequest("r", [1], NO_SAMPLING, pooling_params=CLASSIFY)),
    ):
        core = EngineCore(model, EngineConfig(), epoch=1, clock=lambda: 0.0)
        core.handle(request)
        (outputs,) = take_answers(core)
        assert outputs.outputs[0].finish_reason == "error"
        assert "the model cannot" in (outputs.outputs[0].error or "")


def edit_architectures(folder: Path, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": value}))


def test_a_classifier_without_the_weights_of_its_head_is_refused_with_one_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    edit_architectures(folder, ["LlamaForSequenceClassification"])

    with pytest.raises(EngineStartupError, match=r"MODEL .* lack 1 of the model's weights, for example score.weight"):
        load(folder)


def test_a_classifier_of_a_kind_that_has_none_is_refused_with_one_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForSequenceClassification"]}')

    with pytest.raises(EngineStartupError, match=r"MODEL .* cannot be served: 'mamba' is not a classifier"):
        load(folder)


def test_a_classifier_that_looks_ahead_is_refused_with_one_line(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, bert_config(), num_labels=3)

    with pytest.raises(EngineStartupError, match=r"MODEL .* cannot be served: .* head is not named `score`"):
        load(folder)


@pytest.mark.parametrize("value", [None, [], {}, ["LlamaForCausalLM"], ["ForSequenceClassificationOfMine"]])
def test_a_model_that_names_no_classifier_is_a_language_model(value: Any, tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    edit_architectures(folder, value)

    assert load(folder).info.tasks == ("generate", "embed", "score")
