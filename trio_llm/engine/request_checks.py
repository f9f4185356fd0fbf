"""What is wrong with a message that asks for tokens or a vector.

Pure. Used by the engine core. The front end refuses these requests already; the engine checks them again because a
bad message must fail its own request and nothing else.
"""

from __future__ import annotations

from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue, EngineCoreRequest, ModelConfig

__all__ = ["find_input_problem", "find_request_problem"]


def find_request_problem(request: EngineCoreRequest, model: ModelConfig) -> str | None:
    """Why the model cannot serve a request, or None."""
    token_ids = request.prompt_token_ids + request.output_token_ids
    if not request.prompt_token_ids:
        return "the prompt has no tokens"
    if len(token_ids) >= model.max_model_len + (request.pooling_params is not None):
        return f"{len(token_ids)} tokens leave no room for an answer within {model.max_model_len}"
    if problem := _find_task_problem(request, model):
        return problem
    if request.resumable and request.params.prompt_logprobs is not None:
        return "prompt_logprobs are not supported in sessions"
    if problem := _find_field_problem(token_ids, request.params, request.bad_words_token_ids, model):
        return problem
    assert request.params.max_tokens is not None
    if len(request.output_token_ids) >= request.params.max_tokens:
        return f"all {request.params.max_tokens} tokens of max_tokens were generated already"
    return None


def find_input_problem(message: Continue, model: ModelConfig) -> str | None:
    """Why a session cannot take its next input, or None. The scheduler knows the session and checks the rest."""
    if message.params.prompt_logprobs is not None:
        return "prompt_logprobs are not supported in sessions"
    return _find_field_problem(message.token_ids, message.params, message.bad_words_token_ids, model)


def _find_task_problem(request: EngineCoreRequest, model: ModelConfig) -> str | None:
    pooling = request.pooling_params
    task = "generate" if pooling is None else pooling.task
    if task not in model.tasks:
        return f"the model cannot {task}; it can {', '.join(model.tasks)}"
    if pooling is not None and (request.resumable or request.output_token_ids):
        return "a pooling request has neither inputs that follow nor tokens that were generated"
    return None


def _find_field_problem(
    token_ids: list[int], params: SamplingParams, bad_words: list[list[int]], model: ModelConfig
) -> str | None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.logits_width:
        return f"a token id is outside 0 to {model.logits_width - 1}"
    if not all(bad_words):
        return "a word of bad_words has no tokens"
    if params.max_tokens is None or params.seed is None:
        return "max_tokens and seed must be set"
    return None
