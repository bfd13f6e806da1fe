"""``pd-launch admin``: an operator's request to one node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from pd.commands import parser as types
from pd.core.errors import SetupError

if TYPE_CHECKING:
    import argparse

    import httpx

TEXT = "drain a node, empty it, let it serve again, drop its prefix cache or end its requests"
TIMEOUT_SECONDS = 10.0

_EXAMPLES = """\
examples:
  pd-launch admin drain http://127.0.0.1:30000
  pd-launch admin migrate http://127.0.0.1:30000    # drain, and move its requests to other nodes
  pd-launch admin undrain http://10.0.0.1:30000 --cluster-key-file cluster.key
  pd-launch admin abort-all http://127.0.0.1:30100

Requests are signed with the cluster key, for this node and this moment; the key stays here.
"""


class Action(NamedTuple):
    """A POST request of the nodes' administration."""

    path: str
    body: bytes = b""


ACTIONS = {
    "drain": Action("/drain"),
    "migrate": Action("/drain?migrate=1"),
    "undrain": Action("/undrain"),
    "flush-cache": Action("/flush_cache"),
    "abort-all": Action("/abort_request", b'{"abort_all": true}'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s ACTION URL [--cluster-key-file FILE]"
    parser.epilog = _EXAMPLES
    parser.add_argument("action", choices=tuple(ACTIONS), metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument(
        "url", type=types.parse_node_url, metavar="URL", help="the node's HTTP address"
    )
    parser.add_argument(
        "--cluster-key-file",
        type=types.parse_path,
        metavar="FILE",
        help="the nodes' secret; needed if they have one",
    )
    parser.add_argument(
        "--instance-id",
        metavar="ID",
        help="only act if this instance still answers there (default: whichever does)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask the node and print its answer. Raises SetupError if it is unreachable or refuses."""
    import httpx

    from pd.net.cluster_key import derive_admin_key, load_cluster_key

    path = args.cluster_key_file
    key = derive_admin_key(None if path is None else load_cluster_key(path))
    # We ignore proxies of the environment, because they must not see node traffic.
    with httpx.Client(base_url=args.url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        try:
            instance_id = args.instance_id or _read_instance_id(client)
            answer = _send_action(client, ACTIONS[args.action], key, instance_id)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SetupError(f"cannot ask {args.url}: {error or type(error).__name__}") from None
    print(json.dumps({"instance_id": instance_id} | answer))
    return 0


def _read_instance_id(client: httpx.Client) -> str:
    try:
        return str(client.get("/server_info").raise_for_status().json()["instance_id"])
    except (ValueError, KeyError, TypeError):
        reason = "its /server_info has no instance_id"
        raise SetupError(f"{client.base_url} is no node: {reason}") from None


def _send_action(
    client: httpx.Client, action: Action, key: bytes | None, instance_id: str
) -> dict[str, object]:
    """Return the node's answer. Raises SetupError for a refusal or an answer without proof."""
    from pd.net.signed_requests import SIGNATURE_HEADER, check_reply, sign_headers

    headers, nonce = {"Content-Type": "application/json"}, ""
    if key is not None:
        signed, nonce = sign_headers(key, "POST", action.path, instance_id, action.body)
        headers |= signed
    response = client.post(action.path, content=action.body, headers=headers)
    content, signature = response.content, response.headers.get(SIGNATURE_HEADER, "")
    try:
        answer = json.loads(content)
        if not response.is_success:
            raise SetupError(f"{client.base_url} refused: {answer['error']['message']}")
    except (ValueError, KeyError, TypeError):
        raise SetupError(f"{client.base_url} answered {response.status_code}") from None
    if key is not None and not check_reply(key, nonce, response.status_code, content, signature):
        raise SetupError(
            f"{client.base_url} answered, but did not prove that it has the cluster key"
        )
    return dict(answer)
