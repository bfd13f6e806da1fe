"""Choice of the transfer backend of a pair, from what both sides publish. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Published = Mapping[str, str]


def nvlink_obstacle(prefill: Published, decode: Published) -> str | None:
    """Return why P cannot store into D's GPU memory, or None if it can.

    ``nvlink`` publishes:

    - ``host_id``: boot id and the inode numbers of the pid and ipc namespaces. CUDA IPC handles
      are worth nothing elsewhere.
    - ``device``: UUID of the GPU that holds the pool.
    - ``reachable``: comma-separated UUIDs of the GPUs whose memory this process can map, its own
      included.

    Args:
        prefill, decode: what each side's ``nvlink`` publishes.
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

    ``nixl`` publishes ``reach``: ``network`` where UCX may open ports; otherwise what processes of
    one host have in common that can copy to each other's memory, and between those it opens none.

    Args:
        prefill, decode: what each side's ``nixl`` publishes.
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


def choose(
    prefill: Mapping[str, Published], decode: Mapping[str, Published]
) -> tuple[str, list[str]]:
    """The first backend of P's list that D offers and that can work for the pair.

    Args:
        prefill, decode: backends in order of preference, and what each of them publishes.

    Returns:
        Its name, empty if there is none, and why those offered by both before it cannot work.
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
