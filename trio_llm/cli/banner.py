"""What `trio-llm serve` says once it is ready: where it is, what it runs, what it can hold, and how to try it.

Pure. Used by cli/serve.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from trio_llm.wire.messages import ModelConfig

__all__ = ["banner"]


def banner(model: ModelConfig, *, name: str, urls: Sequence[str], elapsed_s: float) -> str:
    """Several lines, without a line break at the end.

    Args:
        name: what requests call the model.
        urls: where the server listens; at least one, the first goes into the example.
        elapsed_s: from the start to being ready.
    """
    return "\n".join(
        [
            f"Ready after {elapsed_s:.1f} s.",
            f"  URL       {'  '.join(urls)}",
            f"  model     {name}",
            f"  dtype     {model.dtype} on {model.device}",
            f"  context   {model.max_model_len} tokens",
            f"  KV cache  {_capacity(model)}",
            "Try it:",
            f"  curl {urls[0]}/v1/chat/completions -H 'content-type: application/json' \\",
            """    -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'""",
        ]
    )


def _capacity(model: ModelConfig) -> str:
    tokens = model.num_blocks * model.block_size
    requests = max(1, tokens // model.max_model_len)
    return (
        f"{tokens} tokens: about {requests} {'request' if requests == 1 else 'requests'} "
        f"of {min(tokens, model.max_model_len)} tokens"
    )
