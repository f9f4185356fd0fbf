"""The exception tree: what went wrong, who can mend it, its HTTP status, and whether a retry can help.

Pure. Raised everywhere; `frontend/http/server/errors.py` is the one place that turns them into replies.

    TrioLLMError
    ├── ConfigError                 the operator's: a flag or a field of a config is wrong
    ├── CodecError                  a frame on the wire is not one of our messages
    ├── InvalidRequestError   400   the caller's: the request can never work as it is
    │   ├── PromptTooLongError 400
    │   ├── ModelNotFoundError 404
    │   └── BodyTooLargeError  413
    ├── NotSupportedError     501   the server's: this model or this build cannot do that
    ├── KVEventsLostError           a subscriber's: it read too slowly
    ├── FrontEndDeadError           a front-end process died too often (--api-server-count)
    └── EngineError
        ├── EngineGenerateError 500 one request failed: its neighbours go on
        ├── EngineUnavailableError 503 loading, draining or asleep: a retry can help
        ├── OverloadedError     429 a limit of the load is reached: a retry can help
        │   ├── QueueFullError     429 the limit of requests (--max-num-queued-reqs)
        │   └── QueuedTokensError  429 the limit of prompt tokens (--max-num-queued-tokens)
        ├── RequestTimeoutError 504 the time that the caller gave the request is over
        └── EngineDeadError   503   the engine is gone: a retry can help once the server was started again
            └── EngineStartupError  the engine never became ready
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

__all__ = [
    "BodyTooLargeError",
    "CodecError",
    "ConfigError",
    "EngineDeadError",
    "EngineError",
    "EngineGenerateError",
    "EngineStartupError",
    "EngineUnavailableError",
    "FrontEndDeadError",
    "InvalidRequestError",
    "KVEventsLostError",
    "ModelNotFoundError",
    "NotSupportedError",
    "OverloadedError",
    "PromptTooLongError",
    "QueueFullError",
    "QueuedTokensError",
    "RequestTimeoutError",
    "TrioLLMError",
    "fresh",
]


class TrioLLMError(Exception):
    """Base of every error of this package."""

    status: ClassVar[int] = 500
    """HTTP status that suits this error."""
    kind: ClassVar[str] = "server_error"
    """OpenAI's name for the kind of error."""
    can_retry: ClassVar[bool] = False
    """The same call may succeed later without any change."""
    retry_after_s: float | None = None
    """Seconds after which a retry makes sense, if that is known."""
    param: str | None = None
    """The field of the request, or the flag, that is at fault."""


class ConfigError(TrioLLMError, ValueError):
    """A configuration value is wrong. The message names the flag and says what to do."""


class CodecError(TrioLLMError, ValueError):
    """A frame is malformed, or a message cannot be put on the wire."""


class InvalidRequestError(TrioLLMError, ValueError):
    """The request is at fault and will fail again as it is.

    Args:
        message: what is wrong, with its numbers, and what would be right.
        param: the field at fault, as a dotted path (`messages.0.content`).
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt, or prompt and answer together, do not fit the model's context."""

    def __init__(self, *, limit: int, num_prompt_tokens: int, max_tokens: int | None) -> None:
        wanted, advice = "", ""
        if max_tokens is not None:
            wanted, advice = f" and max_tokens is {max_tokens}", " or lower max_tokens"
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but the prompt has "
            f"{num_prompt_tokens}{wanted}; shorten the prompt{advice}",
            "prompt" if max_tokens is None else "max_tokens",
        )


class ModelNotFoundError(InvalidRequestError):
    """No model of that name is served here."""

    status = 404
    kind = "not_found_error"

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(f"the model {name[:200]!r} is not served here; served: {', '.join(served)}", "model")


class BodyTooLargeError(InvalidRequestError):
    """The body of an HTTP request is over the cap."""

    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the request body is larger than {limit_bytes} bytes, the limit of this server (--max-body-bytes)"
        )


class NotSupportedError(TrioLLMError):
    """The model, or this version of the software, has no such ability."""

    status = 501


class KVEventsLostError(TrioLLMError):
    """A subscriber of KV events read too slowly. It got all events before this error, and gets none after it. Other
    subscribers go on."""


class FrontEndDeadError(TrioLLMError):
    """A front-end process under a supervisor died too often, or cannot be started. The message has the last reason."""


class EngineError(TrioLLMError):
    """The engine's side failed."""


class EngineGenerateError(EngineError):
    """One request failed inside the engine or while its output was processed; others go on."""


class EngineUnavailableError(EngineError):
    """The engine takes no requests at the moment: it is loading or asleep, or the server is draining."""

    status = 503
    can_retry = True

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(EngineError):
    """A limit of this server is reached, and the request was refused at once.

    The status is 429 and not 503, because load balancers take a server that answers 503 for broken.
    """

    status = 429
    kind = "rate_limit_error"
    can_retry = True
    reason: ClassVar[str] = "overloaded"
    """The limit that was reached, as metrics name it."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(OverloadedError):
    """The limit of unfinished requests is reached."""

    reason = "max_num_queued_reqs"


class QueuedTokensError(OverloadedError):
    """The limit of prompt tokens of requests without a first token is reached."""

    reason = "max_num_queued_tokens"


class RequestTimeoutError(EngineError):
    """The time that the caller gave this request is over. Output that was not streamed by then is lost."""

    status = 504


class EngineDeadError(EngineError):
    """The engine process is gone for good. The message holds the root cause as far as it is known.

    This engine answers no more. A retry can help a client over HTTP, once the server was started again.
    """

    status = 503
    can_retry = True
    retry_after_s = 10.0


class EngineStartupError(EngineDeadError):
    """The engine ended before it was ready. The message is the one line an operator needs."""


_ErrorT = TypeVar("_ErrorT", bound=TrioLLMError)


def fresh(error: _ErrorT) -> _ErrorT:
    """A copy of `error` with its cause and without its traceback, to be raised in another task.

    Each raise of one exception object adds to the traceback of that object, so an error for several tasks needs a copy
    for each of them.
    """
    copy = type(error).__new__(type(error), *error.args)  # without __init__, whose parameters are the class's own
    copy.__dict__.update(error.__dict__)
    copy.__cause__, copy.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copy
