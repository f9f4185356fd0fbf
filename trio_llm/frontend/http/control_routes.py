"""Routes that control a running engine, there only with `--dev-mode`. The paths are vLLM's.

All programs that can reach loopback can use them, but no web page. Each answers when the engine has done it. A client
that leaves does not stop what has begun. Used by the route table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from pydantic import ConfigDict, Field
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from trio_llm.errors import InvalidRequestError, NotSupportedError
from trio_llm.frontend.http.openai.body import RequestBody
from trio_llm.frontend.http.request_reader import ApiContext
from trio_llm.wire.messages import PlainValue

__all__ = [
    "MAX_ARGS",
    "collective_rpc",
    "pause",
    "reset_prefix_cache",
    "resume",
    "show_paused",
    "show_sleeping",
    "sleep",
    "start_profile",
    "stop_profile",
    "update_weights",
    "wake_up",
]

MAX_ARGS: Final = 64
"""Arguments of a remote call."""

_LISTS: Final = ("tags",)
"""Parameters that may come several times."""
_SWITCHES: Final = {"true": True, "1": True, "false": False, "0": False}


class _ControlBody(RequestBody):
    """Other fields are refused: a misspelt one would do something else than what is meant."""

    model_config = ConfigDict(extra="forbid")


class RemoteCallBody(_ControlBody):
    """A call of the workers."""

    method: str
    args: Annotated[list[PlainValue] | None, Field(max_length=MAX_ARGS)] = None
    timeout: float | None = None
    """Seconds."""


class WeightsBody(_ControlBody):
    """Weights to take from now on."""

    path: str
    """From `--weights-root`."""
    version: str


async def sleep(api: ApiContext, http: Request) -> Response:
    """POST /sleep?level=1."""
    level = _query(http, "level").get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequestError(f"level must be 1 or 2, not {level[:100]!r}", "level")
    await api.client.sleep(int(level))
    return _done()


async def wake_up(api: ApiContext, http: Request) -> Response:
    """POST /wake_up?tags=weights&tags=kv_cache."""
    await api.client.wake_up(_query(http, "tags").getlist("tags") or None)
    return _done()


async def show_sleeping(api: ApiContext, http: Request) -> Response:
    """GET /is_sleeping."""
    _query(http)
    return _json({"is_sleeping": await api.client.is_sleeping()})


async def pause(api: ApiContext, http: Request) -> Response:
    """POST /pause?mode=abort&clear_cache=true. With `wait` the answer comes when running requests are over."""
    query = _query(http, "mode", "clear_cache")
    mode, clears = query.get("mode", "abort"), query.get("clear_cache", "true").lower()
    if clears not in _SWITCHES:
        raise InvalidRequestError(f"clear_cache must be true or false, not {clears[:100]!r}", "clear_cache")
    await api.client.pause_generation(mode=mode, clear_cache=_SWITCHES[clears])
    return _done()


async def resume(api: ApiContext, http: Request) -> Response:
    """POST /resume."""
    _query(http)
    await api.client.resume_generation()
    return _done()


async def show_paused(api: ApiContext, http: Request) -> Response:
    """GET /is_paused."""
    _query(http)
    return _json({"is_paused": await api.client.is_paused()})


async def reset_prefix_cache(api: ApiContext, http: Request) -> Response:
    """POST /reset_prefix_cache."""
    _query(http)
    await api.client.reset_prefix_cache()
    return _done()


async def collective_rpc(api: ApiContext, http: Request) -> Response:
    """POST /collective_rpc with `method`, `args` and `timeout`."""
    body = await api.reader.read(http, RemoteCallBody)
    results = await api.client.collective_rpc(body.method, body.args or [], timeout_s=body.timeout)
    return _json({"results": results})


async def start_profile(api: ApiContext, http: Request) -> Response:
    """POST /start_profile."""
    _query(http)
    await api.client.start_profile()
    return _done()


async def stop_profile(api: ApiContext, http: Request) -> Response:
    """POST /stop_profile."""
    _query(http)
    return _json({"path": await api.client.stop_profile()})


async def update_weights(api: ApiContext, http: Request) -> Response:
    """POST /update_weights with `path`, from `--weights-root`, and `version`."""
    body = await api.reader.read(http, WeightsBody)
    await api.client.update_weights(_below_root(api.config.weights_root, body.path), version=body.version)
    return _done()


def _below_root(weights_root: str | None, path: str) -> str:
    """The path with every link followed, which must not lead out of the root."""
    if weights_root is None:
        raise NotSupportedError("this server takes no weights; start it with --weights-root")
    root = Path(weights_root).resolve()
    try:
        found = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links (which is a RuntimeError), a NUL
        raise InvalidRequestError("path is not a path", "path") from error
    if not found.is_relative_to(root):
        raise InvalidRequestError("path leads out of --weights-root", "path")
    return str(found)


def _query(http: Request, *names: str) -> QueryParams:
    """The query, which has these names alone, of a request without a body.

    Both are refused because a pause that was meant to keep requests would abort them.
    """
    if http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers:
        raise InvalidRequestError("parameters of this path go into the query, not into a body")
    if unknown := sorted(set(http.query_params) - set(names)):
        known = ", ".join(names) or "none"
        raise InvalidRequestError(
            f"there is no {unknown[0][:100]!r} in the query here; there are {known}", unknown[0][:100]
        )
    for name in names:
        if name not in _LISTS and len(values := http.query_params.getlist(name)) > 1:
            raise InvalidRequestError(f"{name} is {len(values)} times in the query; give it once", name)
    return http.query_params


def _done() -> Response:
    return Response(status_code=200)


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
