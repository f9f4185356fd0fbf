"""SchedulerLimits: how much a step, the KV cache and a sequence may have.

Pure. Read by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trio_llm.config import EngineConfig
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import MAX_LOGPROBS
from trio_llm.wire.messages import ModelConfig

__all__ = ["MAX_PROMPT_LOGPROB_COST", "MAX_PROMPT_LOGPROB_COST_CUDA", "SchedulerLimits", "prompt_logprob_cost"]

_POSITION_COST: Final = 20
"""Cost of the row of logits that one position of a prompt needs, in alternatives that are listed."""


def prompt_logprob_cost(num_top: int) -> int:
    """What the log-probabilities of one prompt position cost with `num_top` alternatives."""
    return _POSITION_COST + num_top


MAX_PROMPT_LOGPROB_COST: Final = 64 * prompt_logprob_cost(MAX_LOGPROBS)
"""64 positions with 20 alternatives, or 128 with none: about 0.4 s on a slow CPU."""
MAX_PROMPT_LOGPROB_COST_CUDA: Final = 8 * MAX_PROMPT_LOGPROB_COST
"""512 positions with 20 alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the device and the operator allow. The engine has checked the values before; here they are asserted."""

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
    """Ids from 0 up that can be sampled; any other id is a fault of the device."""
    max_prompt_logprob_cost: int = MAX_PROMPT_LOGPROB_COST
    """Sum of `prompt_logprob_cost` over the prompt positions that get log-probabilities in one step."""
    keeps_cache: bool = True
    """Blocks are found again by what they hold: the beginning that a prompt shares with an earlier one is not computed
    again."""
    logs_kv_events: bool = False
    """Changes of the prefix cache are logged for the front end."""

    def __post_init__(self) -> None:
        assert 0 < self.max_num_seqs <= self.max_num_batched_tokens
        assert 0 < self.max_model_len <= self.num_blocks * self.block_size
        # One position always fits, so that a prompt advances.
        assert self.max_prompt_logprob_cost >= prompt_logprob_cost(MAX_LOGPROBS)

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
            max_prompt_logprob_cost=MAX_PROMPT_LOGPROB_COST_CUDA
            if model.device.startswith("cuda")
            else MAX_PROMPT_LOGPROB_COST,
            keeps_cache=config.enable_prefix_caching,
            logs_kv_events=config.kv_events,
        )

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that admission leaves free while others run, so that their next tokens do not preempt at once."""
        return max(1, self.num_blocks // 64)

    def longest(self, pooling: PoolingParams | None) -> int:
        """A sequence that can go on has fewer tokens than this. One that is pooled needs no room for an answer."""
        return self.max_model_len + (pooling is not None)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
