"""TorchExecutor: runs step plans on a model in this process.

Used by the engine's loop, from one thread. Between steps it keeps the KV cache, the ids that the newest step samples,
and what sampler and pooler could make again from the sequences.
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
from trio_llm.engine.models.base import Model
from trio_llm.engine.models.load import load_model
from trio_llm.engine.models.locate import locate_model
from trio_llm.engine.ops.kv_layout import BLOCK_SIZE
from trio_llm.engine.sampling.logprobs import PendingLogprobs
from trio_llm.engine.sampling.sampler import PendingTokens, Sampler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan, StepResult
from trio_llm.engine.transfer import to_device
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import lay_out
from trio_llm.engine.worker.kv_cache import CachePlan, allocate_kv_cache, free_memory_bytes, plan_kv_cache
from trio_llm.engine.worker.pooler import PendingVectors, Pooler
from trio_llm.engine.worker.profiling import Profiler
from trio_llm.engine.worker.runner import StepRunner, StepTensors
from trio_llm.engine.worker.system_limits import usable_cpus
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
_LOGPROBS_SLICE_BYTES: Final = 32 * 1024 * 1024
"""Size of the float32 logits from which log-probabilities of a prompt are made at once. Memory for several times as
much is in use."""


@dataclass(frozen=True, slots=True, eq=False)
class _TorchStep:
    are_sampled: list[bool]
    """For each chunk with `samples`, in order: it gives a token, else a vector."""
    tokens: PendingTokens | None
    vectors: PendingVectors | None
    prompt_logprobs: list[list[PendingLogprobs]]
    """For each chunk that gives some of its prompt: its positions in slices."""

    def wait(self) -> StepResult:
        tokens = iter(self.tokens.wait() if self.tokens is not None else ())
        vectors = iter(self.vectors.wait() if self.vectors is not None else ())
        outcomes = tuple(next(tokens) if is_sampled else next(vectors) for is_sampled in self.are_sampled)
        prompts = tuple([row for part in parts for row in part.wait()] for parts in self.prompt_logprobs)
        return StepResult(outcomes, prompts)


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
            return _TorchStep([], None, None, [])
        scoring = [index for index, chunk in enumerate(plan.chunks) if chunk.prompt_logprob_positions]
        host = lay_out(plan, self._sampled_rows, pad_rows_to=0, trash_block=self._num_blocks)
        step = self._runner.run(host, keeps_hidden=bool(scoring) or self._pooler.needs_hidden(plan))
        prompt_logprobs = []
        for index in scoring:
            assert step.hidden is not None
            chunk, first = plan.chunks[index], host.first_tokens[index]
            prompt_logprobs.append(self._prompt_logprobs(chunk, step.hidden[first : first + chunk.count]))
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

    def _prompt_logprobs(self, chunk: ScheduledChunk, hidden: Tensor) -> list[PendingLogprobs]:
        """Log-probabilities of the tokens of a prompt that its chunk gives, a bounded number at once.

        Args:
            hidden: [count, H], of the chunk. What the model says about a token is in the row of the one before it.
        """
        positions = chunk.prompt_logprob_positions
        num_top = chunk.sequence.params.prompt_logprobs
        assert num_top is not None
        slice_rows = max(1, _LOGPROBS_SLICE_BYTES // (4 * self._model.logits_width))
        pending = []
        for begin in range(0, len(positions), slice_rows):
            part = positions[begin : begin + slice_rows]
            row = part.start - chunk.start - 1
            logits = self._model.logits(hidden[row : row + len(part)])
            token_ids = chunk.sequence.token_ids[part.start : part.stop]
            own = to_device(token_ids, self._model.device, dtype=torch.int64)
            pending.append(PendingLogprobs(logits, own, [num_top] * len(part)))
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


def load_torch(config: EngineConfig, progress: ProgressCallback) -> TorchExecutor:
    """Find, load and warm up the model that the configuration names.

    Args:
        progress: called in the phases convert (the embedded model, once), load and warm-up.
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
    step_bytes = _step_bytes(model, config)
    cache = plan_kv_cache(
        config,
        model.kv_shape,
        trained_len=model.trained_len,
        free_bytes=free_memory_bytes(device) - step_bytes,
        on_cpu=device.type == "cpu",
    )
    progress("load", 2, _LOAD_STAGES)
    executor = TorchExecutor(model, cache, model_dir=str(model_dir), max_num_seqs=config.max_num_seqs)
    progress("load", _LOAD_STAGES, _LOAD_STAGES)
    progress("warm-up", 0, 1)
    executor.warm_up()
    progress("warm-up", 1, 1)
    return executor


def _step_bytes(model: Model, config: EngineConfig) -> int:
    """Device memory that steps need and the cache must leave. 0 on a CPU, where the cache takes a part of what is free
    anyway, and a full step would make every start slower."""
    if model.device.type != "cuda":
        return 0
    buffers = StepBuffers(model.device, max_rows=config.max_num_seqs, depth=0)
    peak = StepRunner(model, buffers).profile_peak(config.max_num_batched_tokens, config.max_num_seqs)
    torch.cuda.empty_cache()  # or what the step has given back would count as taken
    return peak


def _choose_device(device: Device) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise EngineStartupError("--device cuda: torch sees no CUDA device here; use --device cpu, or auto")
    return torch.device("cuda", 0) if has_cuda and device != "cpu" else torch.device("cpu")
