"""StepRunner: one forward pass per step, from numbers on the host to logits on the device.

Used by the torch executor. The order at start-up: load the model, `profile_peak`, plan the cache, `attach`. Here CUDA
graphs of decode steps will be captured after `attach`, and given up before weights move or the cache goes; until then
every step is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trio_llm.engine.models.base import Model
from trio_llm.engine.ops.attention import Attention, TorchAttention
from trio_llm.engine.ops.kv_layout import BLOCK_SIZE
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import HostBatch, lay_out
from trio_llm.engine.worker.kv_cache import allocate_kv_cache
from trio_llm.engine.worker.profiling import peak_bytes
from trio_llm.wire.messages import NO_SAMPLING

__all__ = ["StepRunner", "StepTensors"]


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """What a step gives, on the device. B is the number of the batch's `logits_rows`."""

    logits: Tensor  # [B, V]
    previous: Tensor  # int64[B]: the token of each of these rows, which comes before the one to sample
    hidden: Tensor | None  # [T, H], in the batch's order


class StepRunner:
    """
    Args:
        make_attention: makes what runs the attention of all steps over one cache.
    """

    def __init__(
        self, model: Model, buffers: StepBuffers, *, make_attention: Callable[[], Attention] = TorchAttention
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._make_attention = make_attention
        self._attention = make_attention()
        self._kv: Tensor = torch.empty(0)

    @torch.inference_mode()
    def profile_peak(self, num_tokens: int, num_rows: int) -> int:
        """Bytes that a step takes on the device at its peak, besides weights and cache: how much the cache must leave.

        Runs prompts of `num_tokens` tokens in `num_rows` rows once, on a small cache of its own. Without the sampler,
        and without the copies that the reference attention makes of longer contexts.
        """
        lengths = [len(part) for part in np.array_split(np.arange(num_tokens), num_rows)]
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        kv = allocate_kv_cache(num_blocks, self._model.kv_shape, self._model.device)
        unused = iter(range(num_blocks))
        chunks = []
        for row, length in enumerate(lengths):
            sequence = Sequence(
                request_id=f"peak {row}",
                token_ids=[0] * length,
                num_prompt_tokens=length,
                params=NO_SAMPLING,
                block_ids=[next(unused) for _ in range(-(-length // BLOCK_SIZE))],
            )
            chunks.append(ScheduledChunk(sequence, 0, length, samples=True))
        host = lay_out(StepPlan(tuple(chunks)), {}, pad_rows_to=0, trash_block=num_blocks)
        attached = self._kv
        self.attach(kv)
        try:
            return peak_bytes(lambda: self.run(host, keeps_hidden=False), self._model.device)
        finally:
            self.attach(attached)

    def attach(self, kv: Tensor) -> None:
        """Run on this cache from now on, and let go of the one before. May be empty: then nothing may run."""
        self._kv = kv
        self._attention = self._make_attention()

    def run(self, host: HostBatch, *, keeps_hidden: bool) -> StepTensors:
        """Begin to compute a batch, in torch's inference mode. Waits for nothing on a GPU.

        Tokens that the step before samples are taken from the buffers' `sampled_ids`.

        Raises:
            Exception: whatever torch raises; the device is lost.
        """
        batch = self._buffers.upload(host)
        sources = batch.token_source
        token_ids = torch.where(sources < 0, batch.token_ids, self._buffers.sampled_ids[sources])
        self._attention.begin(batch, self._kv)
        hidden = self._model.hidden(token_ids, batch.positions, self._attention)
        if len(host.logits_rows):
            logits = self._model.logits(hidden.index_select(0, batch.logits_rows))
        else:  # parts of prompts alone
            logits = hidden.new_empty(0, self._model.logits_width)
        previous = token_ids.index_select(0, batch.logits_rows).to(torch.int64)
        return StepTensors(logits, previous, hidden if keeps_hidden else None)
