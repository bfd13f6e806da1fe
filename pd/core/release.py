"""The release of pd run by a process. Nodes and proxies tell each other.

Messages may change with every release, so all processes of a deployment run the same one. When two
differ, we refuse to use the other and name both. Between releases, :data:`PROTOCOL` distinguishes
builds.
"""

from __future__ import annotations

from pd import __version__
from pd.core.brief import short_repr

# Increase this if a change of messages, handshakes or KV would mislead an older process.
# Processes without a stated number have 1.
PROTOCOL = 2
REMEDY = "run the same release of pd on all nodes and proxies"


def format_release(version: str, protocol: int) -> str:
    """Format a release as processes state it."""
    return f"{version} (protocol {protocol})"


RELEASE = format_release(__version__, PROTOCOL)


def describe_release(release: str) -> str:
    """Describe the release of another process in a message. It is empty if none was stated."""
    if not release:
        return "an earlier pd, which does not state its version"
    is_plain = release.isascii() and release.isprintable() and len(release) <= 100
    return f"pd {release if is_plain else short_repr(release)}"


def describe_mismatch(release: str) -> str:
    """Say why a proxy cannot use a node of this release; empty if both run the same."""
    if release == RELEASE:
        return ""
    return f"it runs {describe_release(release)}, this proxy {describe_release(RELEASE)}: {REMEDY}"
