"""SchedulerLimits: how much of everything there is.

Pure. Read by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from trio_llm.config import EngineConfig
from trio_llm.pooling import PoolingParams
from trio_llm.wire.messages import ModelConfig

__all__ = ["SchedulerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the device and the operator allow. The engine has checked these before; here they are asserted."""

    num_blocks: int
    block_size: int
    """Tokens in a block."""
    max_num_seqs: int
    """Sequences in one step."""
    max_num_batched_tokens: int
    """Token budget of one step; at least `max_num_seqs`, so that every running sequence gets its token."""
    max_model_len: int
    """Tokens of prompt and answer together; they fit the cache, so that a sequence alone always goes on."""
    eos_token_ids: tuple[int, ...]
    logits_width: int
    """Ids from 0 up that can be sampled; any other is a fault of the device."""
    keeps_cache: bool = True
    """Blocks are found again by what they hold: a prompt that begins as an earlier one is not computed again there."""
    logs_kv_events: bool = False
    """What can be found, and what cannot any more, is written down for the front end."""

    def __post_init__(self) -> None:
        assert 0 < self.max_num_seqs <= self.max_num_batched_tokens
        assert 0 < self.max_model_len <= self.num_blocks * self.block_size

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> SchedulerLimits:
        """What a loaded model and its configuration allow."""
        return cls(
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            logits_width=model.logits_width,
            keeps_cache=config.enable_prefix_caching,
            logs_kv_events=config.kv_events,
        )

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that admission leaves free while others run, so that their next tokens preempt nobody at once."""
        return max(1, self.num_blocks // 64)

    def longest(self, pooling: PoolingParams | None) -> int:
        """Known tokens of a sequence that can go on are fewer: one that is pooled leaves no room for an answer."""
        return self.max_model_len + (pooling is not None)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
