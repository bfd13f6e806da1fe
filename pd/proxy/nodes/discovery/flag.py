"""Parses ``--discover``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.brief import short_repr
from pd.core.errors import UsageError
from pd.proxy.nodes.discovery.file_source import FileSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.nodes.discovery.source import Source

FORMS = "file:PATH, dns:NAME:PORT, dns:_SERVICE._tcp.NAME or kubernetes:[NAMESPACE/]SELECTOR[:PORT]"
MAX_SOURCES = 8


def parse_sources(texts: Sequence[str], *, has_key: bool) -> list[Source]:
    """Make the sources given by ``--discover``.

    Args:
        has_key: whether nodes prove a cluster key.

    Raises:
        UsageError: a source is invalid or needs a key; or there are too many.
    """
    if len(texts) > MAX_SOURCES:
        raise UsageError(f"--discover is given {len(texts)} times (at most {MAX_SOURCES})")
    for text in texts:
        # Endpoints of a cluster are never on loopback.
        if text.startswith("kubernetes:") and not has_key:
            raise UsageError(
                f"--discover {short_repr(text)[1:-1]} finds nodes on other hosts, which must "
                "prove a cluster key; set --cluster-key-file"
            )
    return [parse_source(text) for text in texts]


def parse_source(text: str) -> Source:
    """Make one source given by ``--discover``. Raises UsageError for an invalid text."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileSource(rest)
    if kind == "dns" and rest:
        from pd.proxy.nodes.discovery.dns_source import DnsSource

        return DnsSource(rest)
    if kind == "kubernetes" and rest:
        from pd.proxy.nodes.discovery.kubernetes_source import KubernetesSource

        return KubernetesSource(rest)
    raise UsageError(f"--discover {short_repr(text)}: give {FORMS}")
