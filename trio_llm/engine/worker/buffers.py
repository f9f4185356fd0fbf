"""StepBuffers: what a step reads and writes on the device besides the model and its cache.

Used by the step runner. Uploading waits for nothing that the device does, as long as no more steps are in flight than
the buffers were made for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trio_llm.engine.ops.batch import DeviceBatch
from trio_llm.engine.worker.host_batch import HostBatch

__all__ = ["StepBuffers"]


class StepBuffers:
    """
    Args:
        max_rows: sequences in one step.
        depth: steps that may be in flight when the next one is uploaded.
    """

    def __init__(self, device: torch.device, *, max_rows: int, depth: int) -> None:
        self.sampled_ids: Tensor = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """int32[max_rows], at one address for good: the ids that the newest launched step samples. Its sampler writes
        them and the next step reads them, both on the device."""
        self._ring = _PinnedRing(device, depth + 1) if device.type == "cuda" else None

    def upload(self, host: HostBatch) -> DeviceBatch:
        """One copy of the whole batch. On a CPU there is none: the tensors are views of the host's arrays.

        The tensors hold until the next upload.
        """
        flat = torch.from_numpy(host.flat) if self._ring is None else self._ring.copy(host)
        num_tokens, num_rows = len(host.token_ids), len(host.context)
        sizes = [num_tokens] * 4 + [num_rows + 1, num_rows, num_rows + 1, len(host.logits_rows), len(host.blocks)]
        parts = flat.split(sizes)
        return DeviceBatch(
            host=host,
            num_decode=host.num_decode,
            max_query=host.max_query,
            token_ids=parts[0],
            token_source=parts[1],
            positions=parts[2],
            slots=parts[3],
            query_start=parts[4],
            context=parts[5],
            block_start=parts[6],
            logits_rows=parts[7],
            blocks=parts[8],
        )


class _PinnedRing:
    """Pinned host buffers that take turns, and the one on the device that they are copied to.

    The device copies in the order of steps, so that one buffer there is enough. A host buffer is written again only
    when its last copy is through.
    """

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._pinned = [torch.empty(0, dtype=torch.int32, pin_memory=True) for _ in range(num_buffers)]
        self._copied = [torch.cuda.Event() for _ in range(num_buffers)]
        self._on_device = torch.empty(0, dtype=torch.int32, device=device)
        self._turn = 0

    def copy(self, host: HostBatch) -> Tensor:
        """int32[len(host.flat)] on the device, which gets there before all that is launched later."""
        size, turn = len(host.flat), self._turn
        self._turn = (turn + 1) % len(self._pinned)
        self._copied[turn].synchronize()  # of an event that was never recorded: returns at once
        if len(self._pinned[turn]) < size:
            self._pinned[turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        if len(self._on_device) < size:
            self._on_device = self._on_device.new_empty(2 * size)
        self._pinned[turn][:size].numpy()[:] = host.flat
        copied: Tensor = self._on_device[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        self._copied[turn].record()
        return copied
