"""ModelConfig: the loaded model as the front end sees it, taken from the engine's `Ready`.

Pure. Read by the input processor, the routes and the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from trio_llm.wire.messages import Ready

__all__ = ["ModelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_dir: str
    max_model_len: int
    """Tokens of prompt and answer together."""
    logits_width: int
    """Ids the model can emit are below this."""
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    tasks: tuple[str, ...]

    @classmethod
    def from_ready(cls, ready: Ready) -> ModelConfig:
        return cls(
            model_dir=ready.model_dir,
            max_model_len=ready.max_model_len,
            logits_width=ready.logits_width,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            dtype=ready.dtype,
            device=ready.device,
            eos_token_ids=tuple(ready.eos_token_ids),
            tasks=tuple(ready.tasks),
        )
