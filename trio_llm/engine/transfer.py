"""Copies between host and device that do not wait for the device.

Used by the sampler and its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostCopy", "to_device"]


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[list[int]], device: torch.device, *, dtype: torch.dtype
) -> Tensor:
    """The values as a tensor on the device. From memory that is not pinned, CUDA would wait for all earlier work."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors to the host, begun now and complete when the device has reached them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The copies in the order given, once they are complete. May be called again."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
