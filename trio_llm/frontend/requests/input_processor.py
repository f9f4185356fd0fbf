"""InputProcessor: a prompt and its parameters, checked against the loaded model, become an EngineCoreRequest.

Pure but for the random seed and id suffix. Used by `AsyncLLM`.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any, Final

import msgspec

from trio_llm.errors import InvalidRequestError, NotSupportedError, PromptTooLongError
from trio_llm.frontend.requests.output.parallel_sampling import num_scorings
from trio_llm.frontend.requests.tokens_left import check_tokens_left
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams, is_valid_text
from trio_llm.wire.messages import NO_SAMPLING, Continue, EngineCoreRequest, ModelConfig

__all__ = [
    "MAX_CACHE_SALT_CHARS",
    "MAX_PROMPT_LOGPROBS",
    "InputProcessor",
    "check_cache_salt",
    "check_num_scores",
    "check_priority",
    "check_request_id",
    "check_task",
    "make_external_id",
    "make_internal_id",
]

MAX_CACHE_SALT_CHARS: Final = 256

_MAX_REQUEST_ID_CHARS: Final = 256
MAX_PROMPT_LOGPROBS: Final = 128 * 1024
"""Log-probabilities of one request's prompts: about 20 MB of objects while the answer is put together."""


def check_num_scores(name: str, num_prompt_tokens: int, num_top: int) -> None:
    """
    Args:
        name: of the parameter that asks for them.
        num_prompt_tokens: of all prompts of the request.

    Raises:
        InvalidRequestError: so many log-probabilities of prompts are more than one request may have.
    """
    if (wanted := num_prompt_tokens * (num_top + 1)) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{name}: {num_prompt_tokens} prompt tokens with {num_top + 1} log-probabilities each are {wanted}, and "
            f"the limit is {MAX_PROMPT_LOGPROBS}; ask for fewer alternatives, or shorten the prompt",
            name,
        )


def check_priority(priority: int) -> None:
    """Raise InvalidRequestError if it has no form on the wire."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequestError("priority must be a 64-bit integer", "priority")


def check_request_id(external_id: str) -> None:
    """Raise InvalidRequestError if it is no id for a request."""
    if not isinstance(external_id, str) or not 1 <= len(external_id) <= _MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id must be a string of 1 to {_MAX_REQUEST_ID_CHARS} characters", "request_id"
        )
    if not is_valid_text(external_id):
        raise InvalidRequestError("request_id has a lone surrogate, which is not valid text", "request_id")


def check_task(tasks: Collection[str], task: str) -> None:
    """
    Args:
        tasks: of the model.

    Raises:
        NotSupportedError: this one is not among them.
    """
    if task not in tasks:
        raise NotSupportedError(f"the model that is served cannot {task}; it can {', '.join(tasks)}")


def check_cache_salt(cache_salt: str | None) -> None:
    """Raise InvalidRequestError unless it is None or 1 to `MAX_CACHE_SALT_CHARS` characters of valid text."""
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str) or not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARS:
        # Not quoted: it may be a secret.
        raise InvalidRequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_CHARS} characters; leave it out to share with all "
            "requests that have none",
            "cache_salt",
        )
    if not is_valid_text(cache_salt):
        raise InvalidRequestError("cache_salt contains a lone surrogate, which is not valid text", "cache_salt")


def find_age_s(arrival_time: float | None) -> float:
    """Seconds since a request arrived, by its caller's account.

    Args:
        arrival_time: seconds since 1970. None, or a time to come: it arrives now.

    Raises:
        InvalidRequestError: that is no time.
    """
    if arrival_time is None:
        return 0.0
    if isinstance(arrival_time, bool) or not isinstance(arrival_time, int | float) or not 0 <= arrival_time < 2**63:
        raise InvalidRequestError("arrival_time must be seconds since 1970", "arrival_time")
    return max(0.0, time.time() - arrival_time)


def make_external_id(request_id: str | None) -> str:
    """The caller's id, or one made for the caller."""
    return request_id if request_id is not None else uuid.uuid4().hex


def make_internal_id(external_id: str) -> str:
    """Unique for ever, while callers may use an id again whenever they like."""
    return f"{external_id}-{secrets.token_hex(4)}"


class InputProcessor:
    """Refuses what the model cannot do, and fills in what the caller left open."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def process(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | PoolingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
        bad_words_token_ids: list[list[int]] | None = None,
    ) -> EngineCoreRequest:
        """Make the engine's request; `request_id` is the internal id. For a vector, the prompt may fill the context.

        Args:
            bad_words_token_ids: `params.bad_words` in tokens, as `Renderer.render_bad_words` gives them.

        Raises:
            InvalidRequestError: the prompt has no tokens, too many, or ids the model does not know; or the
                parameters do not fit the model. `param` names the field.
            NotSupportedError: the model has no such task.
        """
        if isinstance(params, PoolingParams):
            return self._process_pooling(prompt_token_ids, params, request_id, priority, deadline_s)
        check_task(self._model.tasks, "generate")
        bad_words = bad_words_token_ids or []
        filled = self._check(prompt_token_ids, params, bad_words, num_earlier_tokens=0)
        check_priority(priority)
        check_cache_salt(cache_salt)
        return EngineCoreRequest(
            request_id,
            list(prompt_token_ids),  # the caller may change its own, and this one may be sent again
            filled,
            priority=priority,
            deadline_s=deadline_s,
            bad_words_token_ids=bad_words,
            cache_salt=cache_salt,
        )

    def _process_pooling(
        self,
        prompt_token_ids: list[int],
        params: PoolingParams,
        request_id: str,
        priority: int,
        deadline_s: float | None,
    ) -> EngineCoreRequest:
        check_task(self._model.tasks, params.task)
        self._check_prompt(prompt_token_ids, 0, room=0)
        check_priority(priority)
        return EngineCoreRequest(
            request_id,
            prompt_token_ids,
            NO_SAMPLING,
            priority=priority,
            deadline_s=deadline_s,
            pooling_params=params,
        )

    def process_input(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        num_earlier_tokens: int,
        bad_words_token_ids: list[list[int]],
    ) -> Continue:
        """Make a session's next input. What was checked before is not looked at again.

        Args:
            num_earlier_tokens: of all inputs and answers before.

        Raises:
            InvalidRequestError: as `process`.
        """
        filled = self._check(token_ids, params, bad_words_token_ids, num_earlier_tokens=num_earlier_tokens)
        return Continue(request_id, list(token_ids), filled, bad_words_token_ids)

    def _check(
        self,
        token_ids: list[int],
        params: SamplingParams,
        bad_words: list[list[int]],
        *,
        num_earlier_tokens: int,
    ) -> SamplingParams:
        """The parameters with what was left open. Raises as `process`."""
        self._check_prompt(token_ids, num_earlier_tokens)
        num_tokens = num_earlier_tokens + len(token_ids)
        room = self._model.max_model_len - num_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLongError(
                limit=self._model.max_model_len, num_prompt_tokens=num_tokens, max_tokens=params.max_tokens
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but the context has room for {room} more tokens", "min_tokens"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("bad_words", chain.from_iterable(bad_words))
        eos, width = self._model.eos_token_ids, self._model.logits_width
        check_tokens_left(params, bad_words, token_ids, eos_token_ids=eos, width=width)
        if params.prompt_logprobs is not None:
            check_num_scores("prompt_logprobs", num_tokens * num_scorings(params), params.prompt_logprobs)
        return msgspec.structs.replace(
            params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            # Chosen here and not in the engine: the same request can be computed again elsewhere, with the same tokens.
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._model.logits_width:
                raise InvalidRequestError(
                    f"{name} has the token id {token_id}, but the model's ids end at {self._model.logits_width - 1}",
                    name,
                )

    def _check_prompt(self, token_ids: Any, num_earlier_tokens: int, *, room: int = 1) -> None:
        """
        Args:
            room: tokens that the prompt must leave for an answer.
        """
        if not isinstance(token_ids, list):
            kind = type(token_ids).__name__
            raise InvalidRequestError(f"the prompt must be text or a list of token ids, not of type {kind}", "prompt")
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        num_tokens = num_earlier_tokens + len(token_ids)
        if num_tokens > self._model.max_model_len - room:
            raise PromptTooLongError(limit=self._model.max_model_len, num_prompt_tokens=num_tokens, max_tokens=None)
        # type() and not isinstance(): True is an int, but no token id.
        if any(type(token_id) is not int for token_id in token_ids):
            raise InvalidRequestError("a prompt that is a list must be one of token ids, which are integers", "prompt")
        if min(token_ids) < 0 or max(token_ids) >= self._model.logits_width:
            raise InvalidRequestError(
                f"the prompt's token ids must be from 0 to {self._model.logits_width - 1}, the model's vocabulary",
                "prompt",
            )
