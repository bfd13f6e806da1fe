"""``pd-launch proxy``."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd.commands import parser as types
from pd.commands.ready import Ready, announce
from pd.core.config import ROUTING_POLICIES
from pd.core.errors import UsageError
from pd.proxy.config import ProxyConfig

if TYPE_CHECKING:
    import argparse

logger = logging.getLogger(__name__)

TEXT = "take requests over HTTP and route them to nodes"
API_KEY_VARIABLE = "PD_API_KEY"
ADMIN_API_KEY_VARIABLE = "PD_ADMIN_API_KEY"

_EXAMPLES = f"""\
examples:
  pd-launch proxy --prefill http://127.0.0.1:30000 --decode http://127.0.0.1:30100
  pd-launch proxy --unified http://127.0.0.1:30200 --port 8080
  {API_KEY_VARIABLE}=secret pd-launch proxy --config configs/1p1d/proxy.yaml

ask it:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{{"messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

Nodes may also join and leave later: POST /workers, DELETE /workers/INSTANCE_ID.
SIGTERM (or Ctrl-C) drains it: what runs is finished. A second one ends it at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags; names and defaults are the public contract's."""
    parser.usage = "%(prog)s --prefill URL --decode URL [flags]"
    parser.epilog = _EXAMPLES
    _add_nodes(parser)
    _add_http(parser)
    add = parser.add_argument_group("requests").add_argument
    add(
        "--policy",
        default="cache_aware",
        choices=ROUTING_POLICIES,
        help="how nodes are chosen (default: cache_aware)",
    )
    add(
        "--max-queue",
        type=int,
        default=4096,
        metavar="N",
        help="prompts in the system at most; more are answered 429",
    )
    add(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="deadline of every request; later is answered 408 (default: none)",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("nodes (each flag may be repeated)").add_argument
    for role in ("prefill", "decode", "unified"):
        add(
            f"--{role}",
            action="append",
            default=[],
            type=types.node_url,
            metavar="URL",
            help=f"address of a {role} node",
        )
    add = parser.add_argument_group("model").add_argument
    add(
        "--tokenizer",
        type=types.path,
        metavar="DIR",
        help="model directory with tokenizer.json or tokenizer.model (default: the nodes', if it "
        "is on this host)",
    )
    add(
        "--split-special-tokens",
        action="store_true",
        help="special tokens that clients write are ordinary text; only the chat template's are "
        "control tokens",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help="another name for the first model that the nodes serve",
    )


def _add_http(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=types.port, default=8000, help="0 picks a free one")
    add(
        "--api-key",
        metavar="KEY",
        help="clients must send it; better given as the environment variable "
        f"{API_KEY_VARIABLE}, which other users of this machine cannot see",
    )
    add(
        "--admin-api-key",
        metavar="KEY",
        help="opens workers, caches and requests of others, which otherwise only programs of this "
        f"host may ask for; better given as {ADMIN_API_KEY_VARIABLE}",
    )
    add(
        "--api-keys",
        type=types.path,
        metavar="FILE",
        help="more keys, one a line: inference or admin, the key, and a name if you like",
    )
    add(
        "--cors-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may use the proxy, such as https://chat.example.org; may be repeated, "
        "* lets in all",
    )
    add(
        "--cluster-key-file",
        type=types.path,
        metavar="FILE",
        help="the nodes' secret; needed if they have one",
    )
    add(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long SIGTERM waits for running requests",
    )


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """The proxy's configuration; raises UsageError for values that cannot work."""
    settings = dict(vars(args))
    if args.tokenizer is not None:
        settings["tokenizer"] = str(args.tokenizer)
    for name in ("command", "config", "log_level"):
        settings.pop(name)
    key_file = settings.pop("cluster_key_file")
    if key_file is not None:
        from pd.core.cluster_key import load_cluster_key

        settings["cluster_key"] = load_cluster_key(key_file)
    if settings["api_key"] is None:
        settings["api_key"] = os.environ.get(API_KEY_VARIABLE) or None
    if settings["admin_api_key"] is None:
        settings["admin_api_key"] = os.environ.get(ADMIN_API_KEY_VARIABLE) or None
    if settings["api_keys"] is None:
        settings["api_keys"] = []
    else:
        from pd.proxy.access import load_api_keys

        settings["api_keys"] = load_api_keys(settings["api_keys"])
    # Browsers send them without a slash and in lower case.
    settings["cors_origins"] = [o.rstrip("/").lower() for o in settings["cors_origins"]]
    urls = [*args.prefill, *args.decode, *args.unified]
    for url in urls:
        if urls.count(url) > 1:
            raise UsageError(f"{url} is given more than once; a node has one role")
    config = ProxyConfig(**settings)
    config.validate()
    return config


def advice(config: ProxyConfig) -> list[str]:
    """What is allowed but probably not meant."""
    from pd.core.local_requests import is_loopback

    urls = (*config.prefill, *config.decode, *config.unified)
    found = []
    if not is_loopback(config.host) and not config.key_required:
        found.append(
            f"--host {config.host} without an API key: whoever reaches this port can generate; set "
            f"{API_KEY_VARIABLE} unless something in front checks"
        )
    if "*" in config.cors_origins and not config.key_required:
        found.append(
            "--cors-origins * without an API key: every web page that is open in a browser which "
            "reaches this port can generate"
        )
    if config.cluster_key is None:
        found += [
            f"{url} is not on this host, so its node has a cluster key; without "
            "--cluster-key-file the proxy cannot talk to it"
            for url in urls
            if not is_loopback(urlsplit(url).hostname or "")
        ]
    if config.unified == [] and not (config.prefill and config.decode):
        found.append(
            "serving needs a prefill and a decode node, or a unified one; add what is missing "
            "with POST /workers"
        )
    return found


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the first drains, the second ends at once."""
    config = config_from(args)
    import asyncio

    from pd.proxy.server import serve

    def on_ready(url: str, instance_id: str) -> None:
        logger.info("proxy %s listens on %s", instance_id, url)
        for warning in advice(config):
            logger.warning("%s", warning)
        announce(Ready("proxy", url, instance_id))

    asyncio.run(serve(config, on_ready))
    return 0
