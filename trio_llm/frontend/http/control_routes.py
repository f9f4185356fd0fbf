"""Routes that control a running engine, there only with `--dev-mode`. The paths are vLLM's.

All programs that can reach loopback can use them, but no web page. Each answers when the engine has done it. A client
that leaves does not stop what has begun. Used by the route table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

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
    "finish_weight_update",
    "init_weight_transfer_engine",
    "pause",
    "reset_prefix_cache",
    "resume",
    "show_paused",
    "show_sleeping",
    "sleep",
    "start_profile",
    "start_weight_update",
    "stop_profile",
    "update_weights",
    "wake_up",
]

MAX_ARGS: Final = 64
"""Arguments of a remote call."""

Body = TypeVar("Body", bound=RequestBody)

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
    kwargs: Annotated[dict[str, PlainValue] | None, Field(max_length=MAX_ARGS)] = None
    timeout: float | None = None
    """Seconds."""


class InitInfo(_ControlBody):
    """Where the files of weight updates are."""

    directory: str = "."
    """From `--weights-root`."""


class InitTransferBody(_ControlBody):
    """What comes before the first update in several files."""

    init_info: InitInfo = InitInfo()


class StartUpdateBody(_ControlBody):
    """The beginning of an update in several files."""

    is_checkpoint_format: Literal[True] | None = None
    """What vLLM's clients say if tensors have the names and shapes of a checkpoint. Here they must."""


class UpdateInfo(_ControlBody):
    """Some of the weights of the update that was begun."""

    files: Annotated[list[str], Field(min_length=1)]
    """From the directory of the updates."""


class WeightsBody(_ControlBody):
    """All weights to take from now on, or some of those of an update that was begun."""

    path: str | None = None
    """From `--weights-root`."""
    version: str | None = None
    update_info: UpdateInfo | None = None

    def check_together(self) -> None:
        if self.update_info is None:
            for name, value in (("path", self.path), ("version", self.version)):
                if value is None:
                    raise InvalidRequestError(f"{name} is missing; send path and version, or update_info", name)
        elif self.path is not None or self.version is not None:
            raise InvalidRequestError("update_info goes without path and version", "update_info")


class FinishUpdateBody(_ControlBody):
    """The end of an update in several files."""

    weight_version: str


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
    """POST /collective_rpc with `method`, `args`, `kwargs` and `timeout`."""
    body = await api.reader.read(http, RemoteCallBody)
    results = await api.client.collective_rpc(body.method, body.args or [], body.kwargs, timeout_s=body.timeout)
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
    """POST /update_weights with `path`, from `--weights-root`, and `version`; or with `update_info`."""
    body = await api.reader.read(http, WeightsBody)
    if body.update_info is not None:
        await api.client.update_weights(update_info={"files": body.update_info.files})
    elif body.path is not None:
        await api.client.update_weights(_below_root(api.config.weights_root, body.path, "path"), version=body.version)
    return _done()


async def init_weight_transfer_engine(api: ApiContext, http: Request) -> Response:
    """POST /init_weight_transfer_engine with `init_info`, which may have a `directory` from `--weights-root`."""
    body = await _read_or_default(api, http, InitTransferBody)
    directory = _below_root(api.config.weights_root, body.init_info.directory, "init_info.directory")
    await api.client.init_weight_transfer_engine({"directory": directory})
    return _done()


async def start_weight_update(api: ApiContext, http: Request) -> Response:
    """POST /start_weight_update."""
    await _read_or_default(api, http, StartUpdateBody)
    await api.client.start_weight_update()
    return _done()


async def finish_weight_update(api: ApiContext, http: Request) -> Response:
    """POST /finish_weight_update with `weight_version`."""
    body = await api.reader.read(http, FinishUpdateBody)
    await api.client.finish_weight_update(weight_version=body.weight_version)
    return _done()


async def _read_or_default(api: ApiContext, http: Request, model: type[Body]) -> Body:
    """The body, in which everything may be left out; also all of it."""
    return await api.reader.read(http, model) if await http.body() else model()


def _below_root(weights_root: str | None, path: str, field: str) -> str:
    """The path with every link followed, which must not lead out of the root."""
    if weights_root is None:
        raise NotSupportedError("this server takes no weights; start it with --weights-root")
    root = Path(weights_root).resolve()
    try:
        found = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links (which is a RuntimeError), a NUL
        raise InvalidRequestError(f"{field} is not a path", field) from error
    if not found.is_relative_to(root):
        raise InvalidRequestError(f"{field} leads out of --weights-root", field)
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
