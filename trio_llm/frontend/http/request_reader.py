"""RequestReader: what every route reads of a request before it knows what it is for: its body, names, ids and times.

Used by the routes.
"""

from __future__ import annotations

from typing import Any

import trio
from starlette.requests import Request

from trio_llm.config import ServerConfig
from trio_llm.errors import ModelNotFoundError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.json_body import BIG_BODY_BYTES, parse_json_object
from trio_llm.frontend.http.model_names import served_names
from trio_llm.frontend.http.server.timeouts import TIMEOUT_HEADER, RequestTimeout, timeout_of

__all__ = ["RequestReader", "request_id_of", "request_timeout"]


class RequestReader:
    """One for all routes of a server."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._config = config
        # One at a time: parsing holds the interpreter lock, so that two would only take turns.
        self._big_bodies = trio.CapacityLimiter(1)

    async def json(self, http: Request) -> dict[str, Any]:
        """The body, which must be a JSON object.

        Cancellation: safe.

        Raises:
            InvalidRequestError: it is none.
        """
        body = await http.body()
        content_type = http.headers.get("content-type")
        if len(body) <= BIG_BODY_BYTES:
            return parse_json_object(body, content_type)
        # In a thread, streams get a turn at least between the passes over the body.
        return await trio.to_thread.run_sync(
            parse_json_object, body, content_type, limiter=self._big_bodies, abandon_on_cancel=True
        )

    def model_name(self, asked: str | None) -> str:
        """The served name that a request uses; the first one if it names none.

        Raises:
            ModelNotFoundError: it names another.
        """
        names = served_names(self._client, self._config)
        if asked and asked not in names:
            raise ModelNotFoundError(asked, names)
        return asked or names[0]


def request_id_of(http: Request, field: str | None) -> str:
    """The client's header, else its field, else the id that the shell made."""
    state = http.scope["state"]
    return str(state["client_request_id"] or field or state["request_id"])


def request_timeout(http: Request, field: float | None, began_s: float) -> RequestTimeout:
    """What the header or the field gives the request. Raises as `timeout_of`."""
    return timeout_of(http.headers.get(TIMEOUT_HEADER), field, began_s)
