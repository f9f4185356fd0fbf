"""TorchExecutor: runs step plans on a model in this process.

Used by the engine's loop, from one thread. Between steps it keeps the KV cache, the ids that the newest step samples,
and what sampler and pooler could make again from the sequences.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import transformers

from trio_llm.config import Device, EngineConfig
from trio_llm.engine.device import ProgressCallback, WeightsLocation
from trio_llm.engine.executor.base import Executor, LaunchedStep
from trio_llm.engine.executor.prompt_logprobs import (
    PendingPromptLogprobs,
    has_prompt_logprobs,
    launch_prompt_logprobs,
)
from trio_llm.engine.models.base import Model
from trio_llm.engine.models.load import load_model
from trio_llm.engine.models.locate import locate_model
from trio_llm.engine.ops.kv_layout import BLOCK_SIZE
from trio_llm.engine.sampling.sampler import PendingTokens, Sampler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan, StepResult
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import lay_out
from trio_llm.engine.worker.kv_cache import CachePlan, allocate_kv_cache, free_memory_bytes, plan_kv_cache
from trio_llm.engine.worker.pooler import PendingVectors, Pooler
from trio_llm.engine.worker.profiling import Profiler
from trio_llm.engine.worker.runner import StepRunner, StepTensors
from trio_llm.engine.worker.system_limits import usable_cpus
from trio_llm.engine.worker.weight_files import WeightSource
from trio_llm.engine.worker.weights import WeightStore
from trio_llm.errors import EngineStartupError
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.version import __version__
from trio_llm.wire.messages import NO_SAMPLING, ModelConfig

__all__ = ["TorchExecutor", "load_torch"]

_WARM_UP_TOKENS = BLOCK_SIZE
_LOAD_STAGES = 3
_MAX_RUN_AHEAD: Final = 1
"""Steps in flight when the next one is launched."""


@dataclass(frozen=True, slots=True, eq=False)
class _TorchStep:
    are_sampled: list[bool]
    """For each chunk with `samples`, in order: it gives a token, else a vector."""
    tokens: PendingTokens | None
    vectors: PendingVectors | None
    prompt_logprobs: PendingPromptLogprobs | None

    def wait(self) -> StepResult:
        tokens = iter(self.tokens.wait() if self.tokens is not None else ())
        vectors = iter(self.vectors.wait() if self.vectors is not None else ())
        outcomes = tuple(next(tokens) if is_sampled else next(vectors) for is_sampled in self.are_sampled)
        return StepResult(outcomes, self.prompt_logprobs.wait() if self.prompt_logprobs is not None else ())


class TorchExecutor(Executor):
    """One model, one device, one KV cache.

    Args:
        max_num_seqs: sequences in one step.
    """

    def __init__(self, model: Model, cache: CachePlan, *, model_dir: str, max_num_seqs: int) -> None:
        self._model = model
        self._pooler = Pooler(model.probabilities)
        self._num_blocks = cache.num_blocks
        self._kv = allocate_kv_cache(cache.num_blocks, model.kv_shape, model.device)
        self._buffers = StepBuffers(model.device, max_rows=max_num_seqs, depth=_MAX_RUN_AHEAD)
        self._runner = StepRunner(model, self._buffers)
        self._runner.attach(self._kv)
        self._sampled_rows: dict[Sequence, int] = {}
        """Where each sequence's token stands among the ids that the step before samples."""
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
            trained_len=model.trained_len,
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
            return _TorchStep([], None, None, None)
        host = lay_out(plan, self._sampled_rows, pad_rows_to=0, trash_block=self._num_blocks)
        scores_prompts = has_prompt_logprobs(plan)
        step = self._runner.run(host, keeps_hidden=scores_prompts or self._pooler.needs_hidden(plan))
        prompt_logprobs = None
        if scores_prompts:
            assert step.hidden is not None
            prompt_logprobs = launch_prompt_logprobs(plan, step.hidden, self._model, first_tokens=host.first_tokens)
        ends = [chunk for chunk in plan.chunks if chunk.samples]
        # A model samples or classifies: all rows of logits are for one of the two.
        tokens = self._sample([chunk for chunk in ends if chunk.sequence.pooling is None], step)
        vectors = self._pooler.launch(plan, step.hidden, step.logits, first_tokens=host.first_tokens)
        return _TorchStep([chunk.sequence.pooling is None for chunk in ends], tokens, vectors, prompt_logprobs)

    def _sample(self, chunks: list[ScheduledChunk], step: StepTensors) -> PendingTokens | None:
        if not chunks:
            return None
        pending = self._sampler.launch(
            step.logits[: len(chunks)],  # behind them there may be rows that pad
            [chunk.sequence for chunk in chunks],
            positions=[chunk.start + chunk.count for chunk in chunks],
            previous=step.previous[: len(chunks)],
        )
        self._buffers.sampled_ids[: len(chunks)] = pending.token_ids
        self._sampled_rows = {chunk.sequence: row for row, chunk in enumerate(chunks)}
        return pending

    # -------------------------------------------------------------------------------------- control

    def move(self, weights: WeightsLocation, *, has_cache: bool) -> None:
        self._weights.move(weights)
        if has_cache and not self._kv.numel():
            self._kv = allocate_kv_cache(self._num_blocks, self._model.kv_shape, self._model.device)
        elif not has_cache:
            self._kv = self._kv.new_empty(0)
        self._runner.attach(self._kv)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights(self, source: WeightSource) -> None:
        self._weights.update(source)

    def stage_weights(self, path: Path) -> str:
        return self._weights.staged.stage(path)

    def keep_staged(self, checksums: Collection[str]) -> None:
        self._weights.staged.keep(checksums)

    def weights_checksum(self, prefix: str) -> str:
        return self._weights.checksum(prefix)

    def memory_info(self) -> dict[str, int]:
        free_bytes = free_memory_bytes(self._model.device)
        return {**self._weights.sizes_bytes(), "kv_cache_bytes": self._kv.nbytes, "free_bytes": free_bytes}

    def start_profile(self, folder: Path) -> None:
        self._profiler.start(folder)

    def stop_profile(self) -> str | None:
        return self._profiler.stop()

    def warm_up(self) -> None:
        """Run a short prompt and a decode step, so that no request waits for what torch does once.

        They write into the trash block.
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


def load_torch(config: EngineConfig, progress: ProgressCallback, *, rank: int = 0) -> TorchExecutor:
    """Find, load and warm up the model that the configuration names.

    Args:
        progress: called in the phases convert (the embedded model, once), load and warm-up.
        rank: of this engine among several. On a machine with several GPUs each rank takes the next one in turn.
    Raises:
        EngineStartupError: one line that names the flag, or MODEL, and says what to do.
    """
    model_dir = locate_model(config, progress)
    progress("load", 0, _LOAD_STAGES)
    device = _choose_device(config.device, rank - config.first_rank)
    if device.type == "cpu":
        # torch counts the machine's processors, and a container may have only some of them. With more threads than
        # processors every step crawls.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    model = load_model(model_dir, dtype=config.dtype, device=device)
    progress("load", 1, _LOAD_STAGES)
    step_bytes = _step_bytes(model, config)
    cache = plan_kv_cache(
        config,
        model.kv_shape,
        trained_len=model.trained_len,
        free_bytes=max(0, free_memory_bytes(device) - step_bytes),
        on_cpu=device.type == "cpu",
        num_sharing=_count_sharing(device, config.num_local_engines),
    )
    progress("load", 2, _LOAD_STAGES)
    executor = TorchExecutor(model, cache, model_dir=str(model_dir), max_num_seqs=config.max_num_seqs)
    progress("load", _LOAD_STAGES, _LOAD_STAGES)
    progress("warm-up", 0, 1)
    executor.warm_up()
    progress("warm-up", 1, 1)
    return executor


def _step_bytes(model: Model, config: EngineConfig) -> int:
    """Device memory that a step needs and that the cache must leave free.

    0 on a CPU: the cache takes less than half of what is free there, and a full step would slow down every start.
    """
    if model.device.type != "cuda":
        return 0
    buffers = StepBuffers(model.device, max_rows=config.max_num_seqs, depth=0)
    peak = StepRunner(model, buffers).profile_peak(config.max_num_batched_tokens, config.max_num_seqs)
    torch.cuda.empty_cache()  # else torch keeps what the step has freed, and it does not count as free
    return peak


def _choose_device(device: Device, index: int) -> torch.device:
    """
    Args:
        index: of this engine among those of its front end.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise EngineStartupError("--device cuda: torch sees no CUDA device here; use --device cpu, or auto")
    if not has_cuda or device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", index % torch.cuda.device_count())


def _count_sharing(device: torch.device, num_engines: int) -> int:
    """How many engines of a front end are on the same device."""
    return num_engines if device.type == "cpu" else -(-num_engines // torch.cuda.device_count())
