"""``pd-launch proxy``."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd.commands import parser as types
from pd.commands.flags import ConfigFlags
from pd.commands.ready import Ready, announce
from pd.core.config import ELASTIC, REASONING_PARSERS, ROUTING_POLICIES, TOOL_CALL_PARSERS
from pd.core.errors import UsageError
from pd.proxy.config import ON_OFF, ProxyConfig

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
    """Add the flags, whose names and defaults are the public contract's."""
    parser.usage = "%(prog)s --prefill URL --decode URL [flags]"
    parser.epilog = _EXAMPLES
    flags = ConfigFlags(parser, ProxyConfig)
    _add_nodes(flags)
    _add_model(flags)
    _add_network(flags)
    _add_keys(flags)
    _add_requests(flags)


def _add_nodes(flags: ConfigFlags) -> None:
    flags.start_group("nodes (each flag may be repeated)")
    for role in ("prefill", "decode", "unified"):
        flags.add(
            f"--{role}",
            f"address of a {role} node",
            type=types.node_url,
            repeated=True,
            metavar="URL",
        )


def _add_model(flags: ConfigFlags) -> None:
    flags.start_group("model")
    flags.add(
        "--tokenizer",
        "model directory with tokenizer.json or tokenizer.model (default: the nodes', if it is on "
        "this host)",
        type=types.path,
        metavar="DIR",
    )
    flags.add(
        "--split-special-tokens",
        "special tokens that clients write are ordinary text; only the chat template's are control "
        "tokens",
    )
    flags.add(
        "--tool-call-parser",
        "how the model writes tool calls (auto: as its chat template says)",
        choices=TOOL_CALL_PARSERS,
    )
    flags.add(
        "--reasoning-parser",
        "how the model marks its reasoning (auto: as its chat template says)",
        choices=REASONING_PARSERS,
    )
    flags.add(
        "--served-model-name",
        "another name for the first model that the nodes serve",
        metavar="NAME",
    )


def _add_network(flags: ConfigFlags) -> None:
    flags.start_group("network")
    flags.add("--host", "address to listen on")
    flags.add("--port", "0 picks a free one", type=types.port)
    flags.add(
        "--workers",
        "processes that serve the port; one carries some ten thousand tokens a second",
        type=int,
        metavar="N",
    )
    flags.add(
        "--tls-cert",
        "certificate in PEM format, followed by those of intermediate authorities: the port speaks "
        "HTTPS only; with --tls-key. A file that changes is read again",
        type=types.path,
        metavar="FILE",
    )
    flags.add(
        "--tls-key",
        "private key of --tls-cert in PEM format, without a passphrase; other users of this "
        "machine should not be able to read it",
        type=types.path,
        metavar="FILE",
    )
    flags.add(
        "--cors-origins",
        "web pages that may use the proxy, such as https://chat.example.org; may be repeated, * "
        "lets in all",
        repeated=True,
        metavar="ORIGIN",
    )
    flags.add(
        "--drain-timeout",
        "how long SIGTERM waits for running requests",
        type=float,
        metavar="SECONDS",
    )


def _add_keys(flags: ConfigFlags) -> None:
    flags.start_group("keys")
    flags.add(
        "--api-key",
        "clients must send it; better given as the environment variable "
        f"{API_KEY_VARIABLE}, which other users of this machine cannot see",
        metavar="KEY",
    )
    flags.add(
        "--admin-api-key",
        "opens workers, caches and requests of others, which otherwise only programs of this host "
        f"may ask for; better given as {ADMIN_API_KEY_VARIABLE}",
        metavar="KEY",
    )
    flags.add(
        "--api-keys",
        "more keys, one a line: inference or admin, the key, and a name if you like",
        type=types.path,
        default=None,
        metavar="FILE",
    )
    flags.add(
        "--cluster-key-file",
        "the nodes' secret; needed if they have one",
        type=types.path,
        metavar="FILE",
    )


def _add_requests(flags: ConfigFlags) -> None:
    flags.start_group("requests")
    flags.add("--policy", "how nodes are chosen", choices=ROUTING_POLICIES)
    flags.add(
        "--elastic",
        "auto: of nodes with --elastic auto, those are chosen where a request is predicted to go "
        "best, whatever their roles (policy cache_aware); off: by roles",
        choices=ELASTIC,
    )
    flags.add(
        "--slo-ttft-ms",
        "objective of the time to the first token (default: it follows from the prompt and the "
        "speed of the nodes)",
        type=float,
        metavar="MS",
    )
    flags.add(
        "--slo-itl-ms",
        "objective of the time between tokens, which elastic nodes keep while they compute prompts "
        "(default: it follows from their speed)",
        type=float,
        metavar="MS",
    )
    flags.add(
        "--max-queue",
        "prompts in the system at most; more are answered 429",
        type=int,
        metavar="N",
    )
    flags.add(
        "--stream-interval",
        "tokens that an event of a stream has at least, but for the first and the last one: more "
        "cost less here and look less smooth; a request may choose (stream_interval)",
        type=int,
        metavar="TOKENS",
    )
    flags.add(
        "--request-timeout",
        "deadline of every request; later is answered 408 (default: none)",
        type=float,
        metavar="SECONDS",
    )
    flags.add(
        "--failover",
        "on: requests of a node that fails go on elsewhere, where they stand; off: they end with "
        "502",
        choices=ON_OFF,
    )
    flags.add(
        "--max-failovers",
        "how often a request goes on elsewhere before it ends with 502",
        type=int,
        metavar="N",
    )
    flags.add(
        "--failover-wait",
        "how long a request that lost its node waits for another, if none can go on with it",
        type=float,
        metavar="SECONDS",
    )
    flags.add(
        "--trace-requests",
        "new file with a row for every prompt that was served, when and how long it and its answer "
        "were and what it shared with others, for pd-bench serve --dataset-name trace",
        metavar="FILE",
    )


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """The proxy's configuration; raises UsageError for values that cannot work."""
    settings = dict(vars(args))
    for name in ("tokenizer", "tls_cert", "tls_key"):
        if settings[name] is not None:
            settings[name] = str(settings[name])
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
    """Warnings about settings that are allowed but probably not meant."""
    from pd.core.local_requests import is_loopback

    urls = (*config.prefill, *config.decode, *config.unified)
    found = []
    if not is_loopback(config.host) and not config.key_required:
        found.append(
            f"--host {config.host} without an API key: whoever reaches this port can generate; set "
            f"{API_KEY_VARIABLE} unless something in front checks"
        )
    certificate = config.make_certificate()
    if certificate is not None:
        found += certificate.warnings
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
    from pd.proxy.loop import run_loop
    from pd.proxy.processes.parent import ProxyProcesses
    from pd.proxy.server import Proxy, serve, stop_on_signals

    def on_ready(url: str, instance_id: str) -> None:
        logger.info("proxy %s listens on %s", instance_id, url)
        for warning in advice(config):
            logger.warning("%s", warning)
        announce(Ready("proxy", url, instance_id))

    async def main() -> None:
        proxy = Proxy(config) if config.workers == 1 else ProxyProcesses(config)
        stop_on_signals(proxy)
        await serve(proxy, on_ready)

    run_loop(main())
    return 0
