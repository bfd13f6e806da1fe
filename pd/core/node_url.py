"""URLs under which nodes are given to a proxy or a command."""

from __future__ import annotations

from urllib.parse import urlsplit

from pd.core.brief import brief
from pd.core.errors import InvalidRequestError


def check_node_url(text: str) -> str:
    """The URL as ``scheme://host:port``.

    Raises InvalidRequestError for anything else: a path, a query or user info would make the proxy
    send requests to whatever address a client chose. The message shows none of these, because
    they may hold a password.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        # urlsplit drops some control characters instead of refusing them.
        if not text.isprintable() or " " in text or parts.scheme not in ("http", "https"):
            host = None
    if not host or port == 0:
        raise InvalidRequestError(
            "a node's url must be like http://host:port"
            + ("" if "@" in text else f", not {brief(text)}"),
            param="url",
        )
    authority = f"[{host}]" if ":" in host else host
    url = f"{parts.scheme}://{authority}" + ("" if port is None else f":{port}")
    extra = {
        "user info": "@" in parts.netloc,
        "a path": parts.path not in ("", "/"),
        "a query": bool(parts.query) or "?" in text,
        "a fragment": bool(parts.fragment) or "#" in text,
    }
    found = [name for name, there in extra.items() if there]
    if found:
        raise InvalidRequestError(
            f"a node's url is only http://host:port; {brief(url)} came with {' and '.join(found)}",
            param="url",
        )
    return url
