"""The KV cache: one tensor of blocks on the device, and how many of them there are.

Used by the torch executor and the step runner. The scheduler decides which sequence owns which block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trio_llm.config import GIB, EngineConfig
from trio_llm.engine.models.base import KVShape
from trio_llm.engine.ops.kv_layout import BLOCK_SIZE
from trio_llm.engine.worker.system_limits import available_memory_bytes
from trio_llm.errors import EngineStartupError

__all__ = ["CachePlan", "allocate_kv_cache", "free_memory_bytes", "plan_kv_cache"]

MEMORY_SHARE = 0.4
CPU_LIMIT_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class CachePlan:
    num_blocks: int
    """Blocks that the scheduler may hand out: 0 to num_blocks - 1. The trash block comes on top."""
    max_model_len: int


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of the device, in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()


def plan_kv_cache(
    config: EngineConfig,
    shape: KVShape,
    *,
    trained_len: int | None,
    free_bytes: int,
    on_cpu: bool,
    num_sharing: int = 1,
) -> CachePlan:
    """Decide how many blocks there are and how long a sequence may become.

    A length that the configuration sets is kept or refused. The model's own is cut to what the blocks can hold.

    Args:
        trained_len: the length that the model was trained for, None if unknown.
        free_bytes: memory that the cache may use. It gets a share of it, or the configured size if that fits.
        num_sharing: engines that start at the same time on the same device, and divide this share.
    Raises:
        EngineStartupError: the cache cannot hold one sequence, or does not fit into memory; the message names flags
            and numbers.
    """
    if config.max_model_len is not None and trained_len is not None and config.max_model_len > trained_len:
        raise EngineStartupError(
            f"--max-model-len {config.max_model_len} is above the {trained_len} tokens that the model was trained for"
        )
    wanted_len = config.max_model_len or trained_len
    if wanted_len is None:
        raise EngineStartupError("the model does not say how long its context is; set --max-model-len")

    block_bytes = shape.token_bytes * BLOCK_SIZE
    _check_fits(config, block_bytes, free_bytes=free_bytes)
    num_blocks, because = _num_blocks(
        config, block_bytes, free_bytes=free_bytes, on_cpu=on_cpu, num_sharing=num_sharing
    )
    if num_blocks < 1:
        raise EngineStartupError(
            f"the KV cache needs at least {2 * block_bytes} bytes (two blocks of {BLOCK_SIZE} tokens), "
            f"but {because}; raise --kv-cache-memory or free memory"
        )
    needed = -(-wanted_len // BLOCK_SIZE)
    if num_blocks < needed:
        if config.max_model_len is not None:
            raise EngineStartupError(
                f"one sequence of --max-model-len {config.max_model_len} needs {needed} KV blocks "
                f"({needed * block_bytes} bytes), but {because}, which makes {num_blocks}; lower --max-model-len to "
                f"{num_blocks * BLOCK_SIZE} or raise {_size_flag(config)}"
            )
        wanted_len = num_blocks * BLOCK_SIZE
    if config.num_gpu_blocks_override is None:
        # Not more than all sequences at full length can use.
        num_blocks = min(num_blocks, config.max_num_seqs * -(-wanted_len // BLOCK_SIZE))
    return CachePlan(num_blocks, wanted_len)


def allocate_kv_cache(num_blocks: int, shape: KVShape, device: torch.device) -> Tensor:
    """The cache: [num_blocks + 1, layers, 2, kv_heads, BLOCK_SIZE, head_dim], all zeros.

    The last block is the trash block, which belongs to no sequence: rows that pad a batch or warm up write into it.

    Raises:
        EngineStartupError: there is not enough memory.
    """
    dims = (num_blocks + 1, shape.num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    try:
        if device.type == "cpu":
            # numpy asks the kernel for zero pages: they cost nothing until a block is used.
            size_bytes = (num_blocks + 1) * BLOCK_SIZE * shape.token_bytes
            return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(shape.dtype).view(dims)
        return torch.zeros(dims, dtype=shape.dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EngineStartupError(
            f"no memory for a KV cache of {num_blocks} blocks on {device}; lower --kv-cache-memory"
        ) from error


def _check_fits(config: EngineConfig, block_bytes: int, *, free_bytes: int) -> None:
    """Refuse a configured size that is more than there is: a CPU gives the memory out and kills us when we use it.

    Raises:
        EngineStartupError: with the flag and the numbers.
    """
    if (blocks := config.num_gpu_blocks_override) is not None:
        asked_bytes = (blocks + 1) * block_bytes  # with the trash block
        asked = f"--num-gpu-blocks-override {blocks} needs {asked_bytes} bytes"
        most = f"{max(0, free_bytes // block_bytes - 1)}"
    elif config.kv_cache_memory_bytes is not None:
        asked_bytes = config.kv_cache_memory_bytes
        asked = f"--kv-cache-memory is {asked_bytes} bytes"
        most = f"{free_bytes}"
    else:
        return
    if asked_bytes > free_bytes:
        raise EngineStartupError(f"{asked}, but {free_bytes} bytes are free; lower it to {most} or less")


def _num_blocks(
    config: EngineConfig, block_bytes: int, *, free_bytes: int, on_cpu: bool, num_sharing: int
) -> tuple[int, str]:
    """How many blocks for sequences, and the reason in words."""
    if (override := config.num_gpu_blocks_override) is not None:
        return override, f"--num-gpu-blocks-override is {override}"
    if (size := config.kv_cache_memory_bytes) is not None:
        because = f"--kv-cache-memory is {size} bytes"
    else:
        size = int(free_bytes * MEMORY_SHARE / num_sharing)
        if on_cpu:
            size = min(size, CPU_LIMIT_BYTES)
        because = f"{size} of {free_bytes} free bytes are for it"
    return size // block_bytes - 1, because


def _size_flag(config: EngineConfig) -> str:
    return "--kv-cache-memory" if config.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
