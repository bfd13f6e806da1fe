"""A registry on a real HTTP server, and node infos with one difference."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from pd.bootstrap import Registry, make_bootstrap_app
from pd.core.node_info import KVLayout, NodeInfo, Plane

if TYPE_CHECKING:
    from collections.abc import Callable

KV = KVLayout.of_model(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float32", page_size=16)


def info(instance: str, role: str, **changes: Any) -> NodeInfo:
    node = NodeInfo(
        instance_id=instance,
        role=role,  # type: ignore[arg-type]
        model_id="m",
        kv=KV,
        endpoint=f"tcp://{instance}",
        bootstrap="",
        transfers={"tcp": {"host": "127.0.0.1", "port": "1"}},
    )
    return changed(node, **changes)


def changed(node: NodeInfo, **changes: Any) -> NodeInfo:
    """Change values of a node info, also of the KV layout and of its first plane."""
    layout = {k: v for k, v in changes.items() if k in KVLayout.__struct_fields__}
    plane = {k: v for k, v in changes.items() if k in Plane.__struct_fields__}
    rest = {k: v for k, v in changes.items() if k not in layout | plane}
    planes = (msgspec.structs.replace(node.kv.model, **plane), *node.kv.planes[1:])
    kv = msgspec.structs.replace(node.kv, **{"planes": planes} | layout)
    return msgspec.structs.replace(node, kv=kv, **rest)


class PrefillNode:
    """The part of a prefill node that answers handshakes."""

    def __init__(
        self,
        instance: str = "P",
        *,
        key: bytes | None = None,
        port: int = 0,
        connect: Callable[[NodeInfo], None] | None = None,
        ready: bool = True,
    ) -> None:
        self.connected: list[str] = []
        self.replaced: list[str] = []
        self.registry = Registry(
            info(instance, "prefill"),
            connect=connect or (lambda peer: self.connected.append(peer.instance_id)),
            on_replaced=self.replaced.append,
        )
        if ready:
            self.registry.set_ready()
        self._sock = socket.create_server(("127.0.0.1", port))
        self.port = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            make_bootstrap_app(self.registry, cluster_key=key), log_config=None, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._sock],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10.0)
        self._sock.close()
