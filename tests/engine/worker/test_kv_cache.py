"""The size of the KV cache: what was asked for is kept or refused with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trio_llm.config import GIB, EngineConfig
from trio_llm.engine.models.base import KVShape
from trio_llm.engine.worker.kv_cache import CachePlan, allocate_kv_cache, plan_kv_cache
from trio_llm.errors import EngineStartupError

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
BLOCK_BYTES = 32 * 2 * 2 * 2 * 8 * 4


def plan(*, free_bytes: int = GIB, trained_len: int | None = 256, on_cpu: bool = True, **settings: Any) -> CachePlan:
    return plan_kv_cache(EngineConfig(**settings), SHAPE, trained_len=trained_len, free_bytes=free_bytes, on_cpu=on_cpu)


def test_a_given_number_of_blocks_is_kept_as_it_is() -> None:
    assert plan(num_gpu_blocks_override=1000) == CachePlan(1000, 256)


def test_given_memory_becomes_whole_blocks_one_of_which_is_the_trash_block() -> None:
    assert plan(kv_cache_memory_bytes=20 * BLOCK_BYTES + 1) == CachePlan(19, 256)


def test_without_a_size_it_is_two_fifths_of_what_is_free() -> None:
    assert plan(free_bytes=50 * BLOCK_BYTES) == CachePlan(19, 256)


def test_engines_that_start_together_on_one_device_divide_this_share() -> None:
    halved = plan_kv_cache(
        EngineConfig(), SHAPE, trained_len=256, free_bytes=100 * BLOCK_BYTES, on_cpu=True, num_sharing=2
    )

    assert halved == CachePlan(19, 256)


def test_a_cpu_gives_four_gib_at_most_and_another_device_more() -> None:
    huge: dict[str, Any] = {"free_bytes": 100 * GIB, "trained_len": 2**22}

    assert plan(**huge, on_cpu=True).num_blocks == 4 * GIB // BLOCK_BYTES - 1
    assert plan(**huge, on_cpu=False).num_blocks == 40 * GIB // BLOCK_BYTES - 1


def test_there_are_no_more_blocks_than_all_sequences_together_can_use() -> None:
    assert plan(free_bytes=100 * GIB, max_num_seqs=3, max_model_len=40) == CachePlan(6, 40)


def test_a_length_that_was_not_asked_for_is_cut_to_what_fits() -> None:
    assert plan(kv_cache_memory_bytes=4 * BLOCK_BYTES) == CachePlan(3, 96)
    assert plan(num_gpu_blocks_override=1) == CachePlan(1, 32)


@pytest.mark.parametrize(
    ("size", "flag"),
    [
        ({"kv_cache_memory_bytes": 4 * BLOCK_BYTES}, "--kv-cache-memory"),
        ({"num_gpu_blocks_override": 3}, "--num-gpu-blocks-override"),
    ],
)
def test_a_length_that_was_asked_for_and_does_not_fit_is_refused_with_numbers(size: dict[str, Any], flag: str) -> None:
    with pytest.raises(EngineStartupError) as caught:
        plan(max_model_len=100, **size)

    message = str(caught.value)
    assert "--max-model-len 100" in message
    assert flag in message
    assert "lower --max-model-len to 96" in message
    assert plan(max_model_len=96, **size) == CachePlan(3, 96)


@pytest.mark.parametrize("settings", [{"kv_cache_memory_bytes": 2 * BLOCK_BYTES - 1}, {"free_bytes": 4 * BLOCK_BYTES}])
def test_memory_for_less_than_a_block_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(EngineStartupError, match="--kv-cache-memory"):
        plan(**settings)


@pytest.mark.parametrize(
    ("size", "flag", "lower"),
    [
        (
            {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 1},
            "--kv-cache-memory",
            {"kv_cache_memory_bytes": 10 * BLOCK_BYTES},
        ),
        ({"num_gpu_blocks_override": 10}, "--num-gpu-blocks-override", {"num_gpu_blocks_override": 9}),
    ],
)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_cache_that_is_larger_than_free_memory_is_refused_with_what_would_fit(
    size: dict[str, Any], flag: str, lower: dict[str, Any], on_cpu: bool
) -> None:
    [asked], [fitting] = size.values(), lower.values()

    with pytest.raises(EngineStartupError) as caught:
        plan(free_bytes=10 * BLOCK_BYTES, on_cpu=on_cpu, **size)

    message = str(caught.value)
    assert flag in message
    assert f" {asked} " in message
    assert f"{10 * BLOCK_BYTES} bytes are free" in message
    assert f"lower it to {fitting} " in message
    assert plan(free_bytes=10 * BLOCK_BYTES, on_cpu=on_cpu, **lower) == CachePlan(9, 256)


def test_a_length_beyond_what_the_model_was_trained_for_is_refused() -> None:
    with pytest.raises(EngineStartupError, match=r"--max-model-len 257 .* 256"):
        plan(max_model_len=257, num_gpu_blocks_override=100)


def test_a_model_without_a_known_length_needs_one_given() -> None:
    assert plan(trained_len=None, max_model_len=64, num_gpu_blocks_override=9) == CachePlan(9, 64)
    with pytest.raises(EngineStartupError, match="--max-model-len"):
        plan(trained_len=None, num_gpu_blocks_override=9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_is_zeros_of_the_right_shape_with_one_block_more(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype)

    kv = allocate_kv_cache(5, shape, torch.device("cpu"))

    assert kv.shape == (6, 3, 2, 2, 32, 8)
    assert kv.dtype == dtype
    assert kv.is_contiguous()
    assert not kv.any()
    assert kv.nbytes == 6 * 32 * shape.token_bytes


def test_a_cache_larger_than_the_address_space_is_refused() -> None:
    with pytest.raises(EngineStartupError, match="--kv-cache-memory"):
        allocate_kv_cache(2**44, SHAPE, torch.device("cpu"))
