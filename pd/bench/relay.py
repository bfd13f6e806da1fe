"""``python -m pd.bench.relay DEPLOYMENT``: runs a load process of a deployment as if it were here.

The first line of standard input describes the process (:class:`pd.cluster.orders.Process`). We pass
the rest to the process, and its output to standard output. After its end its log goes to standard
error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import msgspec

from pd.cluster import orders
from pd.cluster.deployment import Deployment, find_deployment
from pd.core.errors import SetupError
from pd.util.printable import escape_text

_GRACE_SECONDS, _START_SECONDS, _POLL_SECONDS = 5.0, 120.0, 0.2


def main() -> int:
    """Relay until the process ends. A signal also ends the process."""
    deployment = find_deployment(sys.argv[1])
    if deployment is None:
        raise SystemExit(f"{sys.argv[1]} is not up")
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=orders.Process)
    try:
        _relay_process(deployment, order)
    except SetupError as error:
        print(f"{order.name} on host {order.host.node}: {error.message}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(SetupError):
            deployment.remove_processes([order.name], _GRACE_SECONDS)
    return 0


def _relay_process(deployment: Deployment, order: orders.Process) -> None:
    # A killed relay may have left its process.
    deployment.remove_processes([order.name], 0.0)
    deployment.client.send_request(orders.Apply([order]))
    _wait_for_start(deployment, order.name)
    threading.Thread(target=_send_input, args=(deployment, order.name), daemon=True).start()
    while True:
        reply = deployment.client.send_request(orders.Read(order.name, "output"))
        sys.stdout.buffer.write(reply.data)
        sys.stdout.buffer.flush()
        if reply.is_over:
            break
    log = deployment.client.send_request(orders.Read(order.name, "log")).data.decode(
        errors="replace"
    )
    for line in log.splitlines():
        print(escape_text(line), file=sys.stderr)


def _wait_for_start(deployment: Deployment, name: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        state = next(s for s in deployment.read_states() if s.name == name)
        if state.state in ("ready", "failed"):
            return
        if time.monotonic() > deadline:
            raise SetupError(f"not started after {_START_SECONDS:g} s: {escape_text(state.detail)}")
        time.sleep(_POLL_SECONDS)


def _send_input(deployment: Deployment, name: str) -> None:
    try:
        while data := os.read(0, orders.MAX_PART_BYTES):
            deployment.client.send_request(orders.Send(name, data))
        deployment.client.send_request(orders.Send(name, b""))
    except SetupError:
        return  # the process has ended, which the other thread notices


if __name__ == "__main__":
    sys.exit(main())
