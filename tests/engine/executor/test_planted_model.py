"""The executor runs whatever implements `Model`: here one without transformers, and with weights that are fused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.executor.test_torch_executor import answers, make_prompt, make_scheduler
from tests.support.sequences import make_sequence
from trio_llm.engine.device import WeightsLocation
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.engine.models.base import KVShape, Model
from trio_llm.engine.ops.attention import Attention
from trio_llm.engine.worker.kv_cache import CachePlan
from trio_llm.errors import EngineStartupError
from trio_llm.sampling import SamplingParams

VOCABULARY, HEADS, DIM = 97, 2, 4
WIDTH = HEADS * DIM
CPU = torch.device("cpu")
SHAPE = KVShape(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)


@dataclass
class PlantedModel:
    """One layer of attention with Q, K and V of one weight, and positions added to the embeddings."""

    weights: Mapping[str, Tensor]
    device: torch.device = CPU
    kv_shape: KVShape = SHAPE
    logits_width: int = VOCABULARY
    tasks: tuple[str, ...] = ("generate", "embed", "score")
    trained_len: int | None = 256
    eos_token_ids: tuple[int, ...] = (2,)
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    probabilities: Callable[[Tensor], Tensor] | None = None

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        hidden = self._embed(token_ids, positions)
        query, key, value = (hidden @ self.weights["fused.qkv"]).view(-1, 3, HEADS, DIM).unbind(1)
        attention.write(0, key, value)
        seen = attention.attend(0, query, scale=DIM**-0.5, window=None, softcap=None)
        return hidden + seen.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights["head"]

    def read_weights(self, source: Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        assert isinstance(source, Path)
        tensors: dict[str, Tensor] = load_file(source / "planted.safetensors")
        return tensors

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self.weights["embedding"][token_ids] + 0.5 * torch.sin(
            positions.unsqueeze(1) * torch.arange(1, WIDTH + 1)
        )

    def oracle(self, token_ids: list[int]) -> Tensor:
        """Logits of all tokens at once, without a cache."""
        hidden = self._embed(torch.tensor(token_ids), torch.arange(len(token_ids)))
        query, key, value = (hidden @ self.weights["fused.qkv"]).view(-1, 3, HEADS, DIM).permute(1, 2, 0, 3)
        seen = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        return self.logits(hidden + seen.transpose(0, 1).flatten(1))


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (VOCABULARY, WIDTH), "fused.qkv": (WIDTH, 3 * WIDTH), "head": (WIDTH, VOCABULARY)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(folder: Path, seed: int) -> Path:
    folder.mkdir()
    save_file(make_weights(seed), folder / "planted.safetensors")
    return folder


def greedy(model: PlantedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model.oracle(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [make_prompt(length) for length in (1, 7, 33, 70)]
PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "planted", seed=0)


@pytest.fixture
def executor(folder: Path) -> TorchExecutor:
    model: Model = PlantedModel(make_weights())  # the type checker holds it to the protocol
    return TorchExecutor(model, CachePlan(64, max_model_len=256), model_dir=str(folder), max_num_seqs=8)


def ask(executor: TorchExecutor, *, budget: int = 512, run_ahead: int = 0) -> list[list[int]]:
    sequences = [make_sequence(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    return answers(executor, sequences, make_scheduler(executor, budget=budget), run_ahead=run_ahead)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("budget", [512, 9])
def test_it_generates_what_it_computes_without_a_cache(executor: TorchExecutor, budget: int, run_ahead: int) -> None:
    model = PlantedModel(make_weights())
    expected = [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)

    executor.warm_up()

    assert ask(executor, budget=budget, run_ahead=run_ahead) == expected


@pytest.mark.parametrize("place", [WeightsLocation.HOST, WeightsLocation.DROPPED])
def test_its_weights_sleep_and_wake_under_the_names_it_gives_them(
    executor: TorchExecutor, place: WeightsLocation
) -> None:
    expected = ask(executor)

    executor.move(place, has_cache=False)
    asleep = executor.memory_info()
    executor.move(WeightsLocation.DEVICE, has_cache=True)

    size = sum(tensor.nbytes for tensor in make_weights().values())
    held = size if place is WeightsLocation.HOST else 0
    assert (asleep["weights_device_bytes"], asleep["weights_host_bytes"]) == (0, held)
    assert executor.memory_info()["weights_device_bytes"] == size
    assert ask(executor) == expected


def test_new_weights_are_taken_under_its_names(executor: TorchExecutor, tmp_path: Path) -> None:
    executor.update_weights(save(tmp_path / "other", seed=1))

    assert ask(executor) == [greedy(PlantedModel(make_weights(1)), prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("fault", ["another shape", "one is missing", "one too many"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    executor: TorchExecutor, tmp_path: Path, fault: str
) -> None:
    expected = ask(executor)
    wrong = make_weights(1)
    if fault == "another shape":
        wrong["head"] = torch.randn(WIDTH, VOCABULARY + 1)
    elif fault == "one is missing":
        del wrong["head"]
    else:
        wrong["more"] = torch.zeros(1)
    (tmp_path / "wrong").mkdir()
    save_file(wrong, tmp_path / "wrong" / "planted.safetensors")

    with pytest.raises(EngineStartupError, match=r"do not fit the model: (head|more) is"):
        executor.update_weights(tmp_path / "wrong")

    assert ask(executor) == expected


def test_the_log_probabilities_of_its_prompts_are_its_own(executor: TorchExecutor) -> None:
    prompt = PROMPTS[-1]
    logprobs = torch.log_softmax(PlantedModel(make_weights()).oracle(prompt), dim=1)
    scheduler = make_scheduler(executor, budget=20)
    scheduler.add(make_sequence("a", prompt, SamplingParams(temperature=0, seed=0, max_tokens=1, prompt_logprobs=0)))

    found = []
    while plan := scheduler.schedule():
        for row in scheduler.commit(plan, executor.execute(plan)):
            found += [entry.logprobs[0] for entry in row.prompt_logprobs or []]

    expected = [logprobs[position - 1, prompt[position]].item() for position in range(1, len(prompt))]
    assert len(found) == len(expected)
    assert all(math.isclose(one, other, abs_tol=1e-4) for one, other in zip(found, expected, strict=True))
