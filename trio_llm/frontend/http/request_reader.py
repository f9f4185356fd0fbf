"""RequestReader: the prologue of every route that takes a body. It reads the body, and who asks for what until when.

Used by the router, which calls it once per request, and by the control routes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import trio
from starlette.requests import Request

from trio_llm.config import ServerConfig
from trio_llm.errors import InvalidRequestError, ModelNotFoundError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.content_coding import decode_content, find_coding
from trio_llm.frontend.http.json_body import BIG_BODY_BYTES, parse_json_object
from trio_llm.frontend.http.model_names import model_names
from trio_llm.frontend.http.openai.body import ModelRequest, RequestBody, parse_body
from trio_llm.frontend.http.openai.responses import AnswerHead
from trio_llm.frontend.http.server.timeouts import TIMEOUT_HEADER, RequestTimeout, timeout_of
from trio_llm.frontend.requests.balancing import Routing
from trio_llm.frontend.requests.input_processor import check_task
from trio_llm.frontend.tracing.headers import TRACE_HEADERS
from trio_llm.quoting import quote

__all__ = ["ApiContext", "Call", "RequestReader"]

_RANK_HEADER: Final = "x-data-parallel-rank"
_MAX_RANK_DIGITS: Final = 9
_SESSION_HEADER: Final = "x-session-id"

Body = TypeVar("Body", bound=RequestBody)
Asked = TypeVar("Asked", bound=ModelRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Asked]):
    """A request to the model, read and checked as far as all routes have the same rules."""

    body: Asked
    model: str
    """The served name that the answer shows."""
    request_id: str
    timeout: RequestTimeout
    routing: Routing
    arrival_time_s: float
    """Seconds since 1970, before the body was read."""
    trace_headers: Mapping[str, str] | None

    def head(self, prefix: str) -> AnswerHead:
        """What the answer begins with. Its id is the prefix, a dash and the request's id."""
        return AnswerHead(id=f"{prefix}-{self.request_id}", created=int(self.arrival_time_s), model=self.model)


class RequestReader:
    """Reads requests of one server."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._max_body_bytes = config.max_body_bytes
        self.model_names: Final = model_names(client.config, config)
        """The served names; the first one is the main one."""
        # One at a time: parsing holds the interpreter lock, so that two would only take turns.
        self._big_bodies = trio.CapacityLimiter(1)

    async def begin(self, http: Request, model: type[Asked], task: str | None) -> Call[Asked]:
        """Read a request to the model.

        Args:
            task: what the served model must be able to do; None: the route checks that.

        Cancellation: safe.

        Raises:
            EngineUnavailableError, OverloadedError, EngineDeadError: the engine takes no requests now. That is
                found before the body is looked at.
            NotSupportedError: the model has no such task.
            InvalidRequestError: the body or the time limit is wrong; `param` names the field.
            ModelNotFoundError: another model is asked for.
        """
        self._client.check_admission()
        began_s, arrival_time_s = trio.current_time(), time.time()
        if task is not None:
            check_task(self._client.get_supported_tasks(), task)
        body = await self.read(http, model)
        state = http.scope["state"]
        return Call(
            body=body,
            model=self.model_name(body.model),
            # The client's header, else its field, else the id that the shell made.
            request_id=str(state["client_request_id"] or body.request_id or state["request_id"]),
            timeout=timeout_of(http.headers.get(TIMEOUT_HEADER), body.timeout, began_s),
            routing=_routing_of(http, body),
            arrival_time_s=arrival_time_s,
            trace_headers=_trace_headers(http),
        )

    async def read(self, http: Request, model: type[Body]) -> Body:
        """The body alone.

        Cancellation: safe.

        Raises:
            InvalidRequestError: it is no JSON object, or not one that the model describes.
            ContentCodingError: it is in a coding that is not known.
            BodyTooLargeError: it is larger than the limit once it is decoded.
        """
        return parse_body(model, await self._json(http))

    async def _json(self, http: Request) -> dict[str, Any]:
        body = await http.body()
        content_type = http.headers.get("content-type")
        codings = http.headers.getlist("content-encoding")
        coding = find_coding(codings) if codings else None
        if coding is None and len(body) <= BIG_BODY_BYTES:
            return parse_json_object(body, content_type)

        def read() -> dict[str, Any]:
            decoded = body if coding is None else decode_content(body, coding, limit=self._max_body_bytes)
            return parse_json_object(decoded, content_type)

        # In a thread, streams get a turn at least between the passes over the body.
        return await trio.to_thread.run_sync(read, limiter=self._big_bodies, abandon_on_cancel=True)

    def model_name(self, asked: str | None) -> str:
        """The served name that a request uses; the first one if it names none.

        Raises:
            ModelNotFoundError: it names another.
        """
        names = self.model_names
        if asked and asked not in names:
            raise ModelNotFoundError(asked, names)
        return asked or names[0]


def _trace_headers(http: Request) -> Mapping[str, str] | None:
    if "traceparent" not in http.headers:
        return None
    # `tracestate` may be cut into several headers, which are one list.
    return {name: ",".join(values) for name in TRACE_HEADERS if (values := http.headers.getlist(name))}


def _routing_of(http: Request, body: ModelRequest) -> Routing:
    """What a request says about the engine that it wants: its headers, else its fields.

    Raises:
        InvalidRequestError: the header is not the number of a rank.
    """
    rank, session_id = body.data_parallel_rank, body.session_id
    if (text := http.headers.get(_RANK_HEADER)) is not None:
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_RANK_DIGITS):
            raise InvalidRequestError(f"{_RANK_HEADER} must be the number of a rank, not {quote(text)}", _RANK_HEADER)
        rank = int(text)
    session_id = http.headers.get(_SESSION_HEADER) or session_id
    return Routing(data_parallel_rank=rank, session_id=session_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What the routes of one server share."""

    client: EngineClient
    config: ServerConfig
    running: RunningRequests
    reader: RequestReader
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
