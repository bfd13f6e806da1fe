"""Chooses the transfer backend of a pair from the published addresses of both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Published = Mapping[str, str]


def nvlink_obstacle(prefill: Published, decode: Published) -> str | None:
    """Return why P cannot store into D's GPU memory, or None if it can.

    ``nvlink`` publishes:

    - ``host_id``: boot id and the inode numbers of the pid and ipc namespaces, because CUDA IPC
      handles are valid nowhere else.
    - ``device``: UUID of the pool's GPU.
    - ``reachable``: comma-separated UUIDs of the GPUs whose memory this process can map, its own
      included.

    Args:
        prefill, decode: each side's published ``nvlink`` address.
    """
    for role, address in (("prefill", prefill), ("decode", decode)):
        for name in ("host_id", "device"):
            if not address.get(name):
                return f"the {role} node published no {name}"
    if prefill["host_id"] != decode["host_id"]:
        return (
            "the nodes are not on one host with shared pid and ipc namespaces "
            f"({prefill['host_id']:.100} and {decode['host_id']:.100})"
        )
    device = decode["device"]
    if device != prefill["device"] and device not in prefill.get("reachable", "").split(","):
        return (
            f"the prefill node (on GPU {prefill['device']:.100}) cannot map the decode node's GPU "
            f"{device:.100}: it must see that GPU and have peer access to it"
        )
    return None


def nixl_obstacle(prefill: Published, decode: Published) -> str | None:
    """Return why UCX cannot connect P and D, or None if it can.

    ``nixl`` publishes ``reach``: ``network`` if UCX may open ports. Otherwise ``reach`` is equal
    for processes of one host with access to each other's memory, so UCX needs no port.

    Args:
        prefill, decode: each side's published ``nixl`` address.
    """
    ours, theirs = prefill.get("reach", ""), decode.get("reach", "")
    if ours == theirs:
        return None
    if "network" in (ours, theirs):
        role = "decode" if ours == "network" else "prefill"
        return (
            f"the {role} node's UCX opens no port, the other's does; give both nodes the same "
            "--transfer-backend and --trust-network, and addresses that are both loopback or "
            "both not"
        )
    return (
        "without a port UCX connects processes of one host, user and pid and ipc namespace only "
        f"({ours:.150} and {theirs:.150}); with --trust-network, or UCX_TLS=all where the "
        "addresses are loopback, on both nodes it opens ports"
    )


_OBSTACLES: dict[str, Callable[[Published, Published], str | None]] = {
    "nvlink": nvlink_obstacle,
    "nixl": nixl_obstacle,
}


def choose_backend(
    prefill: Mapping[str, Published], decode: Mapping[str, Published]
) -> tuple[str, list[str]]:
    """Choose the first backend of P's list that D offers and the pair can use.

    Args:
        prefill, decode: backends in order of preference, with their published addresses.

    Returns:
        The backend's name (empty without one), and the obstacle of each earlier backend offered by
        both.
    """
    obstacles: list[str] = []
    for name, address in prefill.items():
        if name not in decode:
            continue
        check = _OBSTACLES.get(name)
        reason = check(address, decode[name]) if check else None
        if reason is None:
            return name, obstacles
        obstacles.append(f"{name}: {reason}")
    return "", obstacles
