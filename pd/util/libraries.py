"""Checks for library internals on which our limits rely.

Libraries may rename internals at any time. We would then serve without a limit or fail at the first
request, so servers check at their start that all these names exist.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import FunctionType
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_OWN_DISTRIBUTION = "pd-serve"


class Reliance(NamedTuple):
    """Names of a library's class or module that we override or use.

    Attributes:
        library: name of the distribution and package.
        where: path of the module, or of the class in it.
        names: methods and attributes. ``__init__`` of the class has to set instance attributes.
    """

    library: str
    where: str
    names: tuple[str, ...]


_PARSER = (
    "feed_data",
    "get_http_version",
    "get_method",
    "set_dangerous_leniencies",
    "should_keep_alive",
    "should_upgrade",
)
_PROTOCOL = (
    "_start_asgi_task",
    "_unset_keepalive_if_required",
    "app",
    "connection_lost",
    "connection_made",
    "cycle",
    "data_received",
    "flow",
    "headers",
    "logger",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "parser",
    "pause_writing",
    "pipeline",
    "resume_writing",
    "scope",
    "send_400_response",
    "shutdown",
    "transport",
)
_CYCLE = (
    "body",
    "chunked_encoding",
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
)
RELIANCES = (
    Reliance("httptools", "httptools.HttpRequestParser", _PARSER),
    Reliance("httptools", "httptools", ("HttpParserError", "HttpParserUpgrade")),
    Reliance(
        "uvicorn",
        "uvicorn.protocols.http.flow_control.FlowControl",
        ("pause_reading", "read_paused", "resume_reading", "write_paused"),
    ),
    Reliance("uvicorn", "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol", _PROTOCOL),
    Reliance("uvicorn", "uvicorn.protocols.http.httptools_impl.RequestResponseCycle", _CYCLE),
    Reliance(
        "uvicorn",
        "uvicorn.server.Server",
        (
            "capture_signals",
            "on_tick",
            "serve",
            "server_state",
            "should_exit",
            "started",
            "startup",
        ),
    ),
    Reliance("uvicorn", "uvicorn.config.Config", ("backlog", "timeout_keep_alive", "ws")),
    Reliance("starlette", "starlette.routing.Route", ("handle", "matches")),
    Reliance("starlette", "starlette.routing", ("Match",)),
    Reliance("fastapi", "fastapi.routing.APIRouter", ("add_api_route",)),
    Reliance("fastapi", "fastapi.routing", ("APIRoute",)),
)
# Nodes use only these; proxies also the others.
NODE_LIBRARIES = ("httptools", "uvicorn")
PROXY_LIBRARIES = (*NODE_LIBRARIES, "starlette", "fastapi")


def check_libraries(libraries: Collection[str]) -> None:
    """Raise SetupError if one of these libraries lacks a name on which we rely."""
    for reliance in RELIANCES:
        missing = _find_missing(reliance) if reliance.library in libraries else None
        if missing is None:
            continue
        library = reliance.library
        try:
            wanted = importlib.metadata.requires(_OWN_DISTRIBUTION) or []
        except importlib.metadata.PackageNotFoundError:
            wanted = []
        requirement = next((r for r in wanted if r.startswith(library) and ";" not in r), library)
        raise SetupError(
            f"{library} {importlib.metadata.version(library)} has no {missing}, on which limits of "
            f"this server rely; install a release that pd supports: pip install '{requirement}'"
        )


def _find_missing(reliance: Reliance) -> str | None:
    """Return the first missing name, with its class or module."""
    path, _, last = reliance.where.rpartition(".")
    is_class = last[:1].isupper()
    try:
        owner: object = importlib.import_module(path if is_class else reliance.where)
    except ImportError:
        return path if is_class else reliance.where
    if is_class:
        owner = getattr(owner, last, None)
        if not isinstance(owner, type):
            return reliance.where
    present = set(
        _list_attributes(owner, reliance.library) if isinstance(owner, type) else vars(owner)
    )
    return next((f"{last}.{name}" for name in reliance.names if name not in present), None)


def _list_attributes(cls: type, library: str) -> Iterator[str]:
    """List the attributes that a library gives a class and, in ``__init__``, its instances."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == library:
            yield from vars(base)
            init = vars(base).get("__init__")
            if isinstance(init, FunctionType):
                yield from init.__code__.co_names
