"""TorchExecutor: runs step plans on a model in this process.

Used by the engine's loop, from one thread. Nothing is kept between steps but the KV cache, whose slots are
written again after a step that failed, and what the sampler could make again from the sequences.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import transformers
from torch import Tensor

from trio_llm.config import Device, EngineConfig
from trio_llm.engine.device import ProgressCallback, WeightsLocation
from trio_llm.engine.executor.base import Executor, LaunchedStep
from trio_llm.engine.models.causal_lm import CausalLM, HiddenStates
from trio_llm.engine.models.classifier import SequenceClassifier
from trio_llm.engine.models.load import load_model
from trio_llm.engine.models.locate import locate_model
from trio_llm.engine.ops.attention import BLOCK_SIZE
from trio_llm.engine.sampling.logprobs import logprob_rows
from trio_llm.engine.sampling.sampler import PendingTokens, Sampler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, ScheduledChunk, StepPlan, StepResult
from trio_llm.engine.worker.batch import Batch, build_batch
from trio_llm.engine.worker.kv_cache import CachePlan, allocate_kv_cache, free_memory_bytes, plan_kv_cache
from trio_llm.engine.worker.pooler import Pooler
from trio_llm.engine.worker.profiling import Profiler
from trio_llm.engine.worker.system_limits import usable_cpus
from trio_llm.engine.worker.weights import WeightStore
from trio_llm.errors import EngineStartupError
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.version import __version__
from trio_llm.wire.messages import NO_SAMPLING, LogprobRow, ModelConfig

__all__ = ["TorchExecutor", "load_torch"]

_WARM_UP_TOKENS = BLOCK_SIZE
_LOAD_STAGES = 3
_SCORE_SLICE_BYTES: Final = 32 * 1024 * 1024
"""Of float32 logits that log-probabilities of prompts are made from at once; a few times as much is in use."""


@dataclass(frozen=True, slots=True, eq=False)
class _TorchStep:
    are_sampled: list[bool]
    """Of the chunks with `samples`, in order: a token, or else a vector."""
    tokens: PendingTokens | None
    vectors: list[PooledVector | RowError]
    prompt_logprobs: tuple[list[LogprobRow], ...]

    def wait(self) -> StepResult:
        tokens = iter(self.tokens.wait() if self.tokens is not None else ())
        vectors = iter(self.vectors)
        outcomes = tuple(next(tokens) if is_sampled else next(vectors) for is_sampled in self.are_sampled)
        return StepResult(outcomes, self.prompt_logprobs)


class TorchExecutor(Executor):
    """One model, one device, one KV cache."""

    def __init__(self, model: CausalLM, cache: CachePlan, *, model_dir: str) -> None:
        self._model = model
        self._pooler = Pooler(model.probabilities if isinstance(model, SequenceClassifier) else None)
        self._num_blocks = cache.num_blocks
        self._kv = allocate_kv_cache(cache.num_blocks, model.kv_shape, model.device)
        self._sampled_ids = torch.zeros(0, dtype=torch.int64, device=model.device)
        """Of the step that was launched last."""
        self._sampled_rows: dict[Sequence, int] = {}
        """Where each sequence's token stands among them."""
        self._sampler = Sampler(model.eos_token_ids, width=model.logits_width, device=model.device)
        self._weights = WeightStore(model, Path(model_dir))
        self._profiler = Profiler(on_cuda=model.device.type == "cuda")
        self._info = ModelConfig(
            model_dir=model_dir,
            max_model_len=cache.max_model_len,
            logits_width=model.logits_width,
            num_blocks=cache.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=str(model.kv_shape.dtype).removeprefix("torch."),
            device=str(model.device),
            eos_token_ids=model.eos_token_ids,
            tasks=model.tasks,
            sampling_defaults=model.sampling_defaults,
            versions={
                "trio_llm": __version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
            },
            trained_len=model.max_position_embeddings,
        )

    @property
    def info(self) -> ModelConfig:
        return self._info

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute the plan's tokens; sample, pool and score where asked.

        A row without a finite score, or without any token left to choose, is a `RowError`.

        Raises:
            Exception: whatever torch raises; the engine ends.
        """
        if not plan.chunks:
            return _TorchStep([], None, [], ())
        batch = build_batch(plan, self._model.device)
        self._fill_in_pending(batch)
        inputs = batch.token_ids, batch.positions, batch.logits_rows
        scored: tuple[list[LogprobRow], ...] = ()
        hidden = None
        scores = any(chunk.prompt_logprob_positions for chunk in plan.chunks)
        if scores or self._pooler.needs_hidden(plan):
            logits, hidden = self._model.forward_and_keep(*inputs, kv=self._kv, attention=batch.attention)
            scored = self._score(plan, hidden) if scores else ()
        else:
            logits = self._model.forward(*inputs, kv=self._kv, attention=batch.attention)
        ends = [chunk for chunk in plan.chunks if chunk.samples]
        # A model samples or classifies: all rows of logits are for one of the two.
        tokens = self._sample([chunk for chunk in ends if chunk.sequence.pooling is None], batch, logits)
        vectors = self._pooler.pool(plan, None if hidden is None else hidden.tokens, logits)
        return _TorchStep([chunk.sequence.pooling is None for chunk in ends], tokens, vectors, scored)

    def _sample(self, chunks: list[ScheduledChunk], batch: Batch, logits: Tensor) -> PendingTokens | None:
        if not chunks:
            return None
        pending = self._sampler.launch(
            logits,
            [chunk.sequence for chunk in chunks],
            positions=[chunk.start + chunk.count for chunk in chunks],
            previous=batch.token_ids.index_select(0, batch.logits_rows),
        )
        self._sampled_ids = pending.token_ids
        self._sampled_rows = {chunk.sequence: row for row, chunk in enumerate(chunks)}
        return pending

    def _fill_in_pending(self, batch: Batch) -> None:
        """Put the tokens into a batch that the step before samples: from the device to the device."""
        if not batch.pending:
            return
        device = self._model.device
        places = torch.tensor([place for place, _ in batch.pending], dtype=torch.int64, device=device)
        rows = [self._sampled_rows[sequence] for _, sequence in batch.pending]
        batch.token_ids[places] = self._sampled_ids[torch.tensor(rows, dtype=torch.int64, device=device)]

    def _score(self, plan: StepPlan, hidden: HiddenStates) -> tuple[list[LogprobRow], ...]:
        """Log-probabilities of the prompt tokens that the plan's chunks score, a bounded number of rows at a time."""
        slice_rows = max(1, _SCORE_SLICE_BYTES // (4 * self._model.logits_width))
        scored: list[list[LogprobRow]] = []
        first = 0  # row of the chunk's first token in the batch
        for chunk in plan.chunks:
            positions, num_top = chunk.prompt_logprob_positions, chunk.sequence.params.prompt_logprobs
            if positions and num_top is not None:
                scores: list[LogprobRow] = []
                for begin in range(positions.start, positions.stop, slice_rows):
                    part = range(begin, min(begin + slice_rows, positions.stop))
                    # The row of position p is what the model says about position p + 1.
                    rows = torch.arange(part.start, part.stop, device=self._model.device) + (first - chunk.start - 1)
                    logits = self._model.logits_at(hidden, rows)
                    token_ids = chunk.sequence.token_ids[part.start : part.stop]
                    scores += logprob_rows(logits, token_ids, [num_top] * len(part))
                scored.append(scores)
            first += chunk.count
        return tuple(scored)

    # -------------------------------------------------------------------------------------- control

    def move(self, weights: WeightsLocation, *, has_cache: bool) -> None:
        self._weights.move(weights)
        if has_cache and not self._kv.numel():
            self._kv = allocate_kv_cache(self._num_blocks, self._model.kv_shape, self._model.device)
        elif not has_cache:
            self._kv = self._kv.new_empty(0)
            self._model.let_go()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights(self, folder: Path) -> None:
        self._weights.update(folder)

    def memory_info(self) -> dict[str, int]:
        free_bytes = free_memory_bytes(self._model.device)
        return {**self._weights.sizes_bytes(), "kv_cache_bytes": self._kv.nbytes, "free_bytes": free_bytes}

    def start_profile(self, folder: Path) -> None:
        self._profiler.start(folder)

    def stop_profile(self) -> str | None:
        return self._profiler.stop()

    def warm_up(self) -> None:
        """Run a short prompt and a decode step, so that no request pays for what torch does once.

        They write into the block that belongs to no sequence.
        """
        sequence = Sequence(
            request_id="warm-up",
            token_ids=[0] * _WARM_UP_TOKENS,
            num_prompt_tokens=_WARM_UP_TOKENS,
            params=SamplingParams(seed=0) if "generate" in self._info.tasks else NO_SAMPLING,
            block_ids=[self._num_blocks],
            pooling=None if "generate" in self._info.tasks else PoolingParams(task="classify"),
        )
        prompt = _WARM_UP_TOKENS - 1
        self.execute(StepPlan((ScheduledChunk(sequence, 0, prompt, samples=False),)))
        self.execute(StepPlan((ScheduledChunk(sequence, prompt, 1, samples=True),)))


def load_torch(config: EngineConfig, progress: ProgressCallback) -> TorchExecutor:
    """Find, load and warm up the model that the configuration names.

    Args:
        progress: hears of the phases convert (the embedded model, once), load and warm-up.
    Raises:
        EngineStartupError: one line that names the flag, or MODEL, and says what to do.
    """
    model_dir = locate_model(config, progress)
    progress("load", 0, _LOAD_STAGES)
    device = _choose_device(config.device)
    if device.type == "cpu":
        # torch counts the machine's processors, a container may own only some of them: too many threads crawl.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    model = load_model(model_dir, dtype=config.dtype, device=device)
    progress("load", 1, _LOAD_STAGES)
    cache = plan_kv_cache(
        config,
        model.kv_shape,
        trained_len=model.max_position_embeddings,
        free_bytes=free_memory_bytes(device),
        on_cpu=device.type == "cpu",
    )
    progress("load", 2, _LOAD_STAGES)
    executor = TorchExecutor(model, cache, model_dir=str(model_dir))
    progress("load", _LOAD_STAGES, _LOAD_STAGES)
    progress("warm-up", 0, 1)
    executor.warm_up()
    progress("warm-up", 1, 1)
    return executor


def _choose_device(device: Device) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise EngineStartupError("--device cuda: torch sees no CUDA device here; use --device cpu, or auto")
    return torch.device("cuda", 0) if has_cuda and device != "cpu" else torch.device("cpu")
