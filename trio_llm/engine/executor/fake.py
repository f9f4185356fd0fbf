"""FakeExecutor: an executor without a model, with deterministic tokens and configured delays and faults. It refuses
wrong plans.

Not pure, since it sleeps, but free of torch. Used by `FakeLLM`, benchmarks and tests of the scheduler.
"""

from __future__ import annotations

import math
import platform
import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.device import ProgressCallback, WeightsLocation
from trio_llm.engine.executor.base import Executor, LaunchedStep
from trio_llm.engine.executor.fake_vectors import fake_vector
from trio_llm.engine.sampling.logits_processors.bans import NOTHING_LEFT, banned_tokens
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, SampledToken, ScheduledChunk, StepPlan, StepResult
from trio_llm.engine.worker.weight_files import StagedFiles, WeightSource
from trio_llm.errors import InvalidRequestError, NotSupportedError
from trio_llm.pooling import PoolingParams
from trio_llm.version import __version__
from trio_llm.wire.messages import LogprobRow, ModelConfig

__all__ = ["FakeExecutor", "load_fake"]

BLOCK_SIZE: Final = 32
DEFAULT_NUM_BLOCKS: Final = 512

_PROGRESS_INTERVAL_S: Final = 0.05

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: a product with it spreads neighbouring values (Knuth, TAOCP 6.4)."""
_MASK: Final = 2**64 - 1


def load_fake(config: EngineConfig, progress: ProgressCallback, *, model_dir: str) -> FakeExecutor:
    """The executor of `config.fake`, which must be set, after `start_s` seconds with progress reports.

    Args:
        model_dir: directory with the tokenizer of the pretended model.
    """
    fake = config.fake
    assert fake is not None
    num_slices = max(1, math.ceil(fake.start_s / _PROGRESS_INTERVAL_S))
    for done in range(num_slices):
        progress("load", done, num_slices)
        time.sleep(fake.start_s / num_slices)
    progress("load", num_slices, num_slices)
    if config.max_model_len is not None:
        fake = msgspec.structs.replace(fake, max_model_len=config.max_model_len)
    return FakeExecutor(fake, num_blocks=config.num_gpu_blocks_override or DEFAULT_NUM_BLOCKS, model_dir=model_dir)


@dataclass(slots=True, eq=False)
class _Block:
    """What was written into a KV block."""

    num_tokens: int = 0
    digest: int = 0
    """Digest of all tokens of a sequence up to the last one in this block."""


@dataclass(slots=True, eq=False)
class _Memory:
    """What a device would have of a sequence."""

    digests: list[int] = field(default_factory=list)
    """Indexed by position: digest of all tokens up to it."""
    sampled: tuple[int, int] | None = None
    """Position and id of the newest sampled token."""


@dataclass(frozen=True, slots=True, eq=False)
class _FakeStep:
    """A step that is computed. The caller gets its result from `wait`."""

    executor: FakeExecutor
    number: int
    result: StepResult

    def wait(self) -> StepResult:
        self.executor.pass_time(self.number)
        return self.result


class FakeExecutor(Executor):
    """Pretends to compute.

    A token depends on the whole prompt, on its index in the answer and, above temperature 0, on the seed. It depends
    neither on batch, chunks and preemption nor on the content of the cache. It is an end-of-sequence id only if a
    script says so. A plan is refused if it skips or repeats a position, leaves the block table, or reads blocks that do
    not hold the sequence's own tokens.
    """

    def __init__(
        self, fake: FakeEngineConfig, *, num_blocks: int, model_dir: str, block_size: int = BLOCK_SIZE
    ) -> None:
        self._fake = fake
        self._choices = [i for i in range(fake.logits_width) if i not in fake.eos_token_ids]
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._memories: WeakKeyDictionary[Sequence, _Memory] = WeakKeyDictionary()
        self._weights = WeightsLocation.DEVICE
        self._has_cache = True
        self._staged = StagedFiles(bool)
        self._first_digest = 0
        """Stands for the weights: all tokens and the content of the cache depend on it."""
        self._num_steps = 0
        self._info = ModelConfig(
            model_dir=model_dir,
            max_model_len=min(fake.max_model_len, num_blocks * block_size),
            logits_width=fake.logits_width,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="none",
            device="fake",
            eos_token_ids=fake.eos_token_ids,
            tasks=("generate", "embed", "score") if fake.num_labels is None else ("embed", "classify"),
            versions={"trio_llm": __version__, "python": platform.python_version()},
        )

    @property
    def info(self) -> ModelConfig:
        return self._info

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Choose the plan's tokens; `wait` takes `step_s` seconds.

        Raises:
            RuntimeError: a prompt starts with `killer_prompt`.
            AssertionError: the plan is wrong, which is a bug of the scheduler.
        """
        assert self._weights is WeightsLocation.DEVICE, "a step runs while the weights sleep"
        assert self._has_cache, "a step runs while the KV cache sleeps"
        self._num_steps += 1
        if any(chunk.sequence.token_ids[0] == self._fake.killer_prompt for chunk in plan.chunks):
            raise RuntimeError(f"the fake device is lost by a prompt that starts with token {self._fake.killer_prompt}")
        written: dict[int, Sequence] = {}
        for chunk in plan.chunks:
            self._compute(chunk, written)
        result = StepResult(
            tuple(self._sample(chunk) for chunk in plan.chunks if chunk.samples),
            tuple(self._prompt_logprobs(chunk) for chunk in plan.chunks if chunk.prompt_logprob_positions),
        )
        return _FakeStep(self, self._num_steps, result)

    def pass_time(self, number: int) -> None:
        """Take the time of a step.

        Args:
            number: of the step, from 1.
        Raises:
            RuntimeError: this is the step `fail_at_step`.
        """
        if self._fake.step_s > 0:
            time.sleep(self._fake.step_s)
        if number == self._fake.fail_at_step:
            raise RuntimeError(f"the fake device is lost at step {number}, as fail_at_step says")

    # --------------------------------------------------------------------------------------- control

    def move(self, weights: WeightsLocation, *, has_cache: bool) -> None:
        self._weights = weights
        if not has_cache:
            # `_check_context` refuses a plan that goes on with the old content.
            self._blocks = [_Block() for _ in self._blocks]
        self._has_cache = has_cache

    def update_weights(self, source: WeightSource) -> None:
        """A folder's name stands for the weights in it, and checksums for those in files: other ones give other tokens.
        All files that can be read fit."""
        assert self._weights is WeightsLocation.DEVICE, "weights are updated while they sleep"
        if isinstance(source, Path):
            self._first_digest = zlib.crc32(source.name.encode())
        else:
            self._staged.collect(source)
            self._first_digest = zlib.crc32(" ".join(sorted(file.checksum for file in source)).encode())
        self._memories.clear()

    def stage_weights(self, path: Path) -> str:
        return self._staged.stage(path)

    def keep_staged(self, checksums: Collection[str]) -> None:
        self._staged.keep(checksums)

    def weights_checksum(self, prefix: str) -> str:
        """There is one weight, whose name is `weight`."""
        if not "weight".startswith(prefix):
            raise InvalidRequestError(f"the fake model has no weights whose names begin with {prefix!r}", "prefix")
        return f"{self._first_digest:08x}"

    def memory_info(self) -> dict[str, int]:
        """There is no real memory: a token in the cache counts as one byte."""
        kv_cache_bytes = len(self._blocks) * self._info.block_size if self._has_cache else 0
        return {"weights_device_bytes": 0, "weights_host_bytes": 0, "kv_cache_bytes": kv_cache_bytes, "free_bytes": 0}

    def start_profile(self, folder: Path) -> None:
        raise NotSupportedError("the fake device has nothing to profile")

    def stop_profile(self) -> str | None:
        raise NotSupportedError("the fake device has nothing to profile")

    # ------------------------------------------------------------------------------------- the cache

    def _compute(self, chunk: ScheduledChunk, written: dict[int, Sequence]) -> None:
        """Write positions start to start + count - 1 of a sequence, after checking that a device could.

        Args:
            written: the sequence that has written into each block in this step; extended.
        """
        sequence, end = chunk.sequence, chunk.start + chunk.count
        assert chunk.count > 0
        assert chunk.samples == (end >= len(sequence.token_ids)), f"{sequence.request_id}: sampling at {end}"
        assert end <= len(sequence.block_ids) * self._info.block_size, f"{sequence.request_id}: no block for {end - 1}"
        memory = self._memories.setdefault(sequence, _Memory())
        # A sequence that is computed again may have other tokens than before.
        del memory.digests[chunk.start :]
        while len(memory.digests) < end:
            position = len(memory.digests)
            digest = memory.digests[-1] if memory.digests else self._first_digest
            memory.digests.append(_mix(digest, self._token_at(sequence, position, memory)))
        self._check_context(sequence, chunk.start, memory)
        for position in range(chunk.start, end):
            self._write(sequence, position, memory.digests[position], written)

    def _token_at(self, sequence: Sequence, position: int, memory: _Memory) -> int:
        if position < len(sequence.token_ids):
            return sequence.token_ids[position]
        assert memory.sampled is not None, f"{sequence.request_id}: nothing was sampled for {position}"
        sampled_at, token_id = memory.sampled
        assert position == sampled_at, f"{sequence.request_id}: {position} is ahead of all that is sampled"
        return token_id

    def _check_context(self, sequence: Sequence, start: int, memory: _Memory) -> None:
        """Assert that the blocks hold the sequence's tokens before `start`, and nothing behind them."""
        size = self._info.block_size
        for first in range(0, start, size):
            block_id, end = sequence.block_ids[first // size], min(first + size, start)
            block = self._blocks[block_id]
            at = first + block.num_tokens
            is_own = first < at <= len(memory.digests) and block.digest == memory.digests[at - 1]
            assert is_own, f"{sequence.request_id}: block {block_id} holds something else"
            assert at == end, f"{sequence.request_id}: at {at}, not {end}"

    def _write(self, sequence: Sequence, position: int, digest: int, written: dict[int, Sequence]) -> None:
        index, offset = divmod(position, self._info.block_size)
        block_id = sequence.block_ids[index]
        block = self._blocks[block_id]
        if offset == 0:
            is_twice = block_id in sequence.block_ids[:index]
            assert not is_twice, f"{sequence.request_id}: block {block_id} twice in its table"
            block.num_tokens = 0
        assert written.setdefault(block_id, sequence) is sequence, (
            f"{sequence.request_id}: block {block_id} overwritten in this step"
        )
        assert block.num_tokens == offset
        block.num_tokens, block.digest = offset + 1, digest

    # ---------------------------------------------------------------------------------------- tokens

    def _sample(self, chunk: ScheduledChunk) -> SampledToken | PooledVector | RowError:
        sequence, memory = chunk.sequence, self._memories[chunk.sequence]
        if sequence.pooling is not None:
            return self._pool(sequence, sequence.pooling, memory)
        position = chunk.start + chunk.count
        outcome = self._find_fault(sequence) or self._sample_well(sequence, position, memory)
        memory.sampled = position, outcome.token_id if isinstance(outcome, SampledToken) else 0
        return outcome

    def _pool(self, sequence: Sequence, pooling: PoolingParams, memory: _Memory) -> PooledVector | RowError:
        if fault := self._find_fault(sequence):  # no vector stands for token -1
            return fault if isinstance(fault, RowError) else RowError("the fake device has computed no numbers")
        size = self._fake.embedding_size if pooling.task == "embed" else self._fake.num_labels
        assert size is not None, f"{sequence.request_id}: this fake has no classes"
        return fake_vector(memory.digests[-1], pooling, size)

    def _sample_well(self, sequence: Sequence, position: int, memory: _Memory) -> SampledToken | RowError:
        index = position - sequence.num_prompt_tokens
        token_id = self._choose(sequence, memory.digests[sequence.num_prompt_tokens - 1], index)
        if sequence.params.allowed_token_ids is not None or sequence.bad_words:
            is_ahead = position > len(sequence.token_ids)
            pending = [memory.sampled[1]] if is_ahead and memory.sampled is not None else []
            allowed_id = self._nearest_allowed(token_id, sequence, pending)
            if allowed_id is None:
                return RowError(NOTHING_LEFT)
            token_id = allowed_id
        return SampledToken(token_id, self._logprobs(token_id, index, sequence.params.logprobs))

    def _nearest_allowed(self, token_id: int, sequence: Sequence, pending: list[int]) -> int | None:
        """The id, or else the next allowed one above it, then from 0 on. Ends of sequences come last of all."""
        width, eos = self._fake.logits_width, self._fake.eos_token_ids
        allowed = sequence.params.allowed_token_ids
        left = {i for i in (range(width) if allowed is None else allowed) if i < width}
        left -= banned_tokens(sequence, eos, pending=pending)
        if token_id in left:
            return token_id
        return min(left - set(eos) or left, key=lambda one: (one - token_id) % width, default=None)

    def _prompt_logprobs(self, chunk: ScheduledChunk) -> list[LogprobRow]:
        token_ids, num_top = chunk.sequence.token_ids, chunk.sequence.params.prompt_logprobs
        rows = [self._logprobs(token_ids[position], position, num_top) for position in chunk.prompt_logprob_positions]
        return [row for row in rows if row is not None]

    def _find_fault(self, sequence: Sequence) -> SampledToken | RowError | None:
        """The fault that this row is configured to have, or None. A subclass may have other faults."""
        first = sequence.token_ids[0]
        if first == self._fake.failing_row_prompt:
            return RowError(f"the fake device fails rows whose prompt starts with token {first}")
        return SampledToken(-1) if first == self._fake.faulty_token_prompt else None

    def _choose(self, sequence: Sequence, prompt_digest: int, index: int) -> int:
        """The token at `index` of an answer. A subclass may have other answers."""
        if self._fake.script:
            return self._fake.script[index % len(self._fake.script)]
        seed = sequence.params.seed
        if seed is not None and not sequence.params.is_greedy:
            prompt_digest = _mix(prompt_digest, seed)
        return self._choices[(_mix(prompt_digest, index) >> 32) % len(self._choices)]

    def _logprobs(self, token_id: int, index: int, num_top: int | None) -> LogprobRow | None:
        """A distribution in which each rank is half as likely as the one before. The sampled token has rank 1 or 2."""
        if num_top is None:
            return None
        width = self._fake.logits_width
        sampled_rank = 1 + index % 2
        ranks = range(1, 1 + min(num_top, width - 1))
        top = [token_id if rank == sampled_rank else (token_id + rank) % width for rank in ranks]
        return LogprobRow(
            token_ids=[token_id, *top],
            logprobs=[-rank * math.log(2) for rank in (sampled_rank, *ranks)],
            sampled_rank=sampled_rank,
        )


def _mix(digest: int, value: int) -> int:
    mixed = ((digest ^ (value & _MASK)) + 1) * _GOLDEN & _MASK
    return mixed ^ (mixed >> 29)
