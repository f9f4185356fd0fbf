"""The banner of `trio-llm serve`: URL, model, context, capacity of the KV cache, and a command to try it.

Pure. Used by cli/serve.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from trio_llm.wire.messages import ModelConfig

__all__ = ["banner"]


def banner(
    model: ModelConfig, *, name: str, urls: Sequence[str], elapsed_s: float, asked_len: int | None = None
) -> str:
    """Several lines, without a line break at the end.

    Args:
        name: what requests call the model.
        urls: where the server listens; at least one, the first goes into the example.
        elapsed_s: from the start to being ready.
        asked_len: `--max-model-len`, in tokens; None: the longest possible.
    """
    return "\n".join(
        [
            f"Ready after {elapsed_s:.1f} s.",
            f"  URL       {'  '.join(urls)}",
            f"  model     {name}",
            f"  dtype     {model.dtype} on {model.device}",
            f"  context   {_context(model, asked_len)}",
            f"  KV cache  {_capacity(model)}",
            "Try it:",
            f"  curl {urls[0]}/v1/chat/completions -H 'content-type: application/json' \\",
            """    -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'""",
        ]
    )


def _context(model: ModelConfig, asked_len: int | None) -> str:
    text = f"{model.max_model_len} tokens"
    if asked_len is None and model.trained_len is not None and model.max_model_len < model.trained_len:
        text += f", cut from {model.trained_len}: the KV cache holds no more; raise --kv-cache-memory, or free memory"
    return text


def _capacity(model: ModelConfig) -> str:
    tokens = model.num_blocks * model.block_size
    requests = max(1, tokens // model.max_model_len)
    return (
        f"{tokens} tokens: about {requests} {'request' if requests == 1 else 'requests'} "
        f"of {min(tokens, model.max_model_len)} tokens"
    )
