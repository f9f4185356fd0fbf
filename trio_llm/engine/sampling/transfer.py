"""Between host and device without waiting for the device: what the sampler sends and what it asks for.

Used by the sampler's parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostCopy", "to_device"]


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[list[int]], device: torch.device, *, dtype: torch.dtype
) -> Tensor:
    """The values as a tensor on the device. From pageable memory CUDA would wait for all that runs before."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors on the host, begun now and to be had when the device has got there."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """In the order given. May be called again."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
