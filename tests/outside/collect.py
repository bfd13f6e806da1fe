"""Collects everything that users, clients and other processes see of pd, without its prose.

That is: the flags of every command and their exit statuses, the HTTP interfaces of the proxy and of
nodes, metrics, wire messages and errors. The result is compared with ``snapshot.json``, so that
moving and renaming code cannot change any of it unnoticed. Descriptions and help texts may change,
and so may the names of modules, classes and functions, because none of them is collected.

If you change the outside on purpose, rewrite the snapshot from the root of the repository and
commit it together with your change::

    python -m tests.outside.collect --write

Without ``--write`` the command prints the differences and exits with 1 if there are any.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from .commands import describe_commands
from .comparison import find_differences, render
from .openapi import describe_openapi
from .servers import RunningServers
from .wire import describe_structs, leaf_classes

# Everything in pd that we know by name. Modules move; this is the only place to follow them.
ROOT_PACKAGE = "pd"
NODE_SERVER = "pd.launch:NodeServer"
NODE_CONFIG = "pd.core.config:NodeConfig"
KV_EVENTS_CONFIG = "pd.core.kv_events_config:KVEventsConfig"
PROXY_SERVER = "pd.proxy.server:ProxyThread"
PROXY_CONFIG = "pd.proxy.config:ProxyConfig"
ERROR = "pd.core.errors:PDError"
ERROR_FROM_KIND = "pd.core.errors:error_from_kind"
# Structs of these packages stay among the processes of one program, or read what others define.
INNER_PACKAGES = ("pd.bench.", "pd.engine.", "pd.grammar.", "pd.proxy.")
# Libraries that are not installed everywhere. Modules that need them define nothing of the outside.
OPTIONAL_LIBRARIES = {"flashinfer", "mooncake", "nixl", "triton", "uvloop"}

REPOSITORY = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("snapshot.json")


def collect_outside() -> dict[str, Any]:
    """Collect the outside of this version as plain JSON values."""
    import_all_modules()
    structs = leaf_classes("msgspec:Struct", ROOT_PACKAGE)
    with RunningServers(
        resolve(NODE_SERVER),
        resolve(NODE_CONFIG),
        resolve(KV_EVENTS_CONFIG),
        resolve(PROXY_SERVER),
        resolve(PROXY_CONFIG),
    ) as servers:
        outside = {
            "answers": servers.describe_answers(),
            "metrics": servers.describe_metrics(),
            "openapi": describe_openapi(servers.openapi()),
            "routes": servers.describe_routes(),
        }
    outside |= {
        "commands": describe_commands(_programs()),
        "errors": _describe_errors(),
        "messages": describe_structs(
            [cls for cls in structs if not cls.__module__.startswith(INNER_PACKAGES)]
        ),
    }
    # JSON makes lists of tuples. Every release has a new version.
    version = importlib.import_module(ROOT_PACKAGE).__version__
    text = json.dumps(outside).replace(f"{version} (protocol ", "VERSION (protocol ")
    plain: dict[str, Any] = json.loads(text)
    return plain


def import_all_modules() -> None:
    """Import every module of pd, so that all subclasses of a class are known."""
    package = importlib.import_module(ROOT_PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{ROOT_PACKAGE}."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL_LIBRARIES:
                raise


def resolve(name: str) -> Any:
    """Import ``package.module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _programs() -> dict[str, Any]:
    """Load the entry points of the programs that pip installs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {name: resolve(target) for name, target in project["scripts"].items()}


def _describe_errors() -> dict[str, Any]:
    """Describe which statuses and codes errors have, and which codes survive the wire."""
    base, from_kind = resolve(ERROR), resolve(ERROR_FROM_KIND)
    errors = {base, *leaf_classes(base, ROOT_PACKAGE, only_leaves=False)}
    by_code: dict[str, set[str]] = {}
    for error in errors:
        facts = f"status {error.status}, type {error.type}, exit status {error.exit_status}"
        by_code.setdefault(error.kind, set()).add(facts)
    return {
        "codes": {code: sorted(facts) for code, facts in by_code.items()},
        "travelling": [code for code in sorted(by_code) if from_kind(code, "").kind == code],
    }


def main(arguments: list[str]) -> int:
    """Print the differences from the snapshot, or rewrite it with ``--write``."""
    if arguments not in ([], ["--write"]):
        print("usage: python -m tests.outside.collect [--write]", file=sys.stderr)
        return 2
    outside = collect_outside()
    if arguments:
        SNAPSHOT.write_text(render(outside))
        return 0
    differences = find_differences(json.loads(SNAPSHOT.read_text()), outside)
    print("\n".join(differences) or "nothing has changed")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
