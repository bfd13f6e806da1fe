"""``pd-launch proxy``."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd.commands import parser as types
from pd.commands.flags import ConfigFlags
from pd.commands.ready import Ready, announce_ready
from pd.core.config import ELASTIC, REASONING_PARSERS, ROUTING_POLICIES, TOOL_CALL_PARSERS
from pd.core.errors import UsageError
from pd.proxy.config import ON_OFF, ProxyConfig
from pd.proxy.nodes.discovery.flag import FORMS, parse_sources
from pd.util.libraries import PROXY_LIBRARIES, check_libraries

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
SIGTERM (or Ctrl-C) drains it: running requests finish. A second one ends it at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, whose names and defaults are the public contract's."""
    parser.usage = "%(prog)s --prefill URL --decode URL [flags]"
    parser.epilog = _EXAMPLES
    flags = ConfigFlags(parser, ProxyConfig)
    add, start_group = flags.add_flag, flags.start_group
    add_number = partial(add, type=int, metavar="N")
    add_seconds = partial(add, type=float, metavar="SECONDS")
    add_ms = partial(add, type=float, metavar="MS")
    add_file = partial(add, type=types.parse_path, metavar="FILE")

    start_group("nodes (each flag may be repeated)")
    add_node = partial(add, type=types.parse_node_url, repeated=True, metavar="URL")
    for role in ("prefill", "decode", "unified"):
        add_node(f"--{role}", f"address of a {role} node")
    add(
        "--discover",
        f"where to find further nodes, which join and leave as they are listed: {FORMS}; beyond "
        "this host they need --cluster-key-file",
        repeated=True,
        metavar="SOURCE",
    )

    start_group("model")
    add(
        "--tokenizer",
        "model directory with tokenizer.json or tokenizer.model (default: the nodes', if it is on "
        "this host)",
        type=types.parse_path,
        metavar="DIR",
    )
    add(
        "--split-special-tokens",
        "treat special tokens that clients write as ordinary text; only the chat template's are "
        "control tokens",
    )
    add(
        "--tool-call-parser",
        "how the model writes tool calls (auto: as its chat template says)",
        choices=TOOL_CALL_PARSERS,
    )
    add(
        "--reasoning-parser",
        "how the model marks its reasoning (auto: as its chat template says)",
        choices=REASONING_PARSERS,
    )
    add(
        "--served-model-name",
        "other names for the first model that the nodes serve; answers and GET /v1/models show the "
        "first of them",
        type=types.parse_model_name,
        repeated=True,
        nargs="+",
        metavar="NAME",
    )

    start_group("network")
    add("--host", "address to listen on", type=types.parse_host)
    add("--port", "0 picks a free one", type=types.parse_port)
    add_number(
        "--workers", "processes that serve the port; one carries some ten thousand tokens a second"
    )
    add_file(
        "--tls-cert",
        "certificate in PEM format, followed by those of intermediate authorities: the port speaks "
        "HTTPS only; with --tls-key. A file that changes is read again",
    )
    add_file(
        "--tls-key",
        "private key of --tls-cert in PEM format, without a passphrase; other users of this "
        "machine should not be able to read it",
    )
    add(
        "--cors-origins",
        "web pages that may use the proxy, such as https://chat.example.org; may be repeated, * "
        "lets in all",
        repeated=True,
        metavar="ORIGIN",
    )
    add_seconds("--drain-timeout", "how long SIGTERM waits for running requests")

    start_group("keys")
    add(
        "--api-key",
        "clients must send it; better given as the environment variable "
        f"{API_KEY_VARIABLE}, which other users of this machine cannot see",
        metavar="KEY",
    )
    add(
        "--admin-api-key",
        "opens workers, caches and requests of others, which otherwise only programs of this host "
        f"may ask for; better given as {ADMIN_API_KEY_VARIABLE}",
        metavar="KEY",
    )
    add_file(
        "--api-keys",
        "more keys, one per line: inference or admin, the key, and optionally a name",
        default=None,
    )
    add_file("--cluster-key-file", "the nodes' secret; needed if they have one")

    start_group("requests")
    add("--policy", "how to choose nodes", choices=ROUTING_POLICIES)
    add(
        "--elastic",
        "auto: of nodes with --elastic auto, choose those where a request is predicted to go best, "
        "whatever their roles (policy cache_aware); off: by roles",
        choices=ELASTIC,
    )
    add_ms(
        "--slo-ttft-ms",
        "objective of the time to the first token (default: it follows from the prompt and the "
        "speed of the nodes)",
    )
    add_ms(
        "--slo-itl-ms",
        "objective of the time between tokens, which elastic nodes keep while they compute prompts "
        "(default: it follows from their speed)",
    )
    add_number("--max-queue", "most prompts in the system; more are answered 429")
    add(
        "--stream-interval",
        "least number of tokens in an event of a stream, except for the first and the last one: "
        "more cost less here and look less smooth; a request may choose (stream_interval)",
        type=int,
        metavar="TOKENS",
    )
    add_seconds("--request-timeout", "deadline of every request; then 408 (default: none)")
    add(
        "--failover",
        "on: requests of a node that fails continue on another node; off: they end with 502",
        choices=ON_OFF,
    )
    add_number("--max-failovers", "how often a request fails over before it ends with 502")
    add_seconds(
        "--failover-wait",
        "how long a request that lost its node waits for another, if none can continue it",
    )
    add(
        "--trace-requests",
        "new file with a row for every served prompt: when, how long it and its answer "
        "were and what it shared with others, for pd-bench serve --dataset-name trace",
        metavar="FILE",
    )

    start_group("storage")
    add(
        "--storage-dir",
        "directory on a local disk for responses and files that clients store, one per proxy "
        "(default: a temporary one, removed at the end)",
        type=types.parse_path,
        metavar="DIR",
    )
    add_number("--storage-mb", "most MiB of stored responses per API key; the oldest make room")
    add_number("--files-mb", "most MiB of uploaded files and of batches' results per API key")
    add_number(
        "--batch-concurrency",
        "most requests of /v1/batches under way; they have a lower priority than others, and wait "
        "while half of --max-queue is taken",
    )


def make_config(args: argparse.Namespace) -> ProxyConfig:
    """Make the proxy's configuration. Raises UsageError for impossible values."""
    settings = dict(vars(args))
    for name in ("tokenizer", "tls_cert", "tls_key", "storage_dir"):
        if settings[name] is not None:
            settings[name] = str(settings[name])
    for name in ("command", "config", "log_level"):
        settings.pop(name)
    key_file = settings.pop("cluster_key_file")
    if key_file is not None:
        from pd.net.cluster_key import load_cluster_key

        settings["cluster_key"] = load_cluster_key(key_file)
    for name, variable in (
        ("api_key", API_KEY_VARIABLE),
        ("admin_api_key", ADMIN_API_KEY_VARIABLE),
    ):
        if settings[name] is None:
            settings[name] = _read_key(variable)
    if settings["api_keys"] is None:
        settings["api_keys"] = []
    else:
        from pd.proxy.http.access import load_api_keys

        settings["api_keys"] = load_api_keys(settings["api_keys"])
        # Browsers send origins without a slash and in lower case.
    settings["cors_origins"] = [o.rstrip("/").lower() for o in settings["cors_origins"]]
    urls = [*args.prefill, *args.decode, *args.unified]
    for url in urls:
        if urls.count(url) > 1:
            raise UsageError(f"{url} is given more than once; a node has one role")
    config = ProxyConfig(**settings)
    config.validate()
    return config


def _read_key(variable: str) -> str | None:
    """Return the key in an environment variable, if it is set. Raises UsageError for an empty one,
    because it would open the proxy to everybody although a key was meant."""
    key = os.environ.get(variable)
    if key == "":
        raise UsageError(
            f"the environment variable {variable} is empty: give it a key, or unset it"
        )
    return key


def find_warnings(config: ProxyConfig) -> list[str]:
    """Return warnings about settings that are probably a mistake."""
    from pd.core.addresses import is_loopback

    urls = (*config.prefill, *config.decode, *config.unified)
    warnings = []
    if not is_loopback(config.host) and not config.key_required:
        warnings.append(
            f"--host {config.host} without an API key: anyone who reaches this port can generate; "
            f"set {API_KEY_VARIABLE} unless something in front checks"
        )
    certificate = config.make_certificate()
    if certificate is not None:
        warnings += certificate.warnings
    if "*" in config.cors_origins and not config.key_required:
        warnings.append(
            "--cors-origins * without an API key: every web page that is open in a browser which "
            "reaches this port can generate"
        )
    if config.cluster_key is None:
        warnings += [
            f"{url} is not on this host, so its node has a cluster key; without "
            "--cluster-key-file the proxy cannot talk to it"
            for url in urls
            if not is_loopback(urlsplit(url).hostname or "")
        ]
    if not config.discover and config.unified == [] and not (config.prefill and config.decode):
        warnings.append(
            "serving needs a prefill and a decode node, or a unified one; add the missing ones "
            "with POST /workers"
        )
    return warnings


def check_sources(config: ProxyConfig) -> None:
    """Raise UsageError if --discover lists nodes of other hosts and the proxy has no cluster key,
    because they prove with it that they are ours. We ask silent sources again later."""
    if config.discover and config.cluster_key is None:
        import asyncio

        from pd.proxy.nodes.discovery.start_check import refuse_strangers

        asyncio.run(refuse_strangers(parse_sources(config.discover, has_key=False)))


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. The first one drains, the second one ends at once."""
    check_libraries(PROXY_LIBRARIES)
    config = make_config(args)
    check_sources(config)
    from pd.proxy.server import Proxy, serve, stop_on_signals
    from pd.proxy.workers.loop import run_loop
    from pd.proxy.workers.parent import ProxyProcesses

    def on_ready(url: str, instance_id: str) -> None:
        logger.info("proxy %s listens on %s", instance_id, url)
        for warning in find_warnings(config):
            logger.warning("%s", warning)
        announce_ready(Ready("proxy", url, instance_id))

    async def main() -> None:
        proxy = Proxy(config) if config.workers == 1 else ProxyProcesses(config)
        stop_on_signals(proxy)
        await serve(proxy, on_ready)

    run_loop(main())
    return 0
