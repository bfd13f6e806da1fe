"""Renders the Helm chart, and judges manifests as a cluster would."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/pd"
CRDS = Path(__file__).parent / "crds"
RELEASE, NAMESPACE = "demo", "prod"
OLDEST, NEWEST = "1.28", "1.37"
# Values without which the chart does not render, because they are for the operator to choose.
NEEDED = {"clusterKey": {"existingSecret": "our-key"}, "apiKeys": {"existingSecret": "our-clients"}}

Manifest = dict[str, Any]

# It reads a megabyte of JSON for each manifest.
utils.schema_contents = functools.cache(utils.schema_contents)


@functools.cache
def chart() -> helm.Chart:
    return helm.Chart.load(CHART)


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Dictionaries laid over one another, as Helm does it with values."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            both = isinstance(value, dict) and isinstance(below, dict)
            merged[key] = merge(below, value) if both else value
    return merged


def render(values: dict[str, Any] | None = None) -> list[Manifest]:
    """The manifests of a release with these values, in addition to those it needs."""
    return _render(json.dumps(merge(NEEDED, values or {})))


@functools.cache
def _render(values: str) -> list[Manifest]:
    files = chart().render(json.loads(values), name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def check_manifest(manifest: Manifest, version: str) -> None:
    """Raise an error unless a cluster of that version accepts the manifest. Kinds that neither
    Kubernetes nor a committed schema has are an error too."""
    _check(json.dumps(manifest), version)


@functools.cache
def _check(text: str, version: str) -> None:
    manifest = json.loads(text)
    schema = CRDS / f"{manifest['kind'].lower()}.json"
    if not schema.exists():
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, json.loads(schema.read_text()))
    if manifest["kind"] == "LeaderWorkerSet":
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": template_of(manifest)}
        kubernetes_validate.validate(template, version, strict=True)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def template_of(workload: Manifest) -> Manifest:
    """The pod template of a Deployment or LeaderWorkerSet."""
    spec = workload["spec"]
    if workload["kind"] == "LeaderWorkerSet":
        return spec["leaderWorkerTemplate"]["workerTemplate"]
    return spec["template"]


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Deployments and LeaderWorkerSets by component: prefill, decode and proxy."""
    found = of_kind(manifests, "Deployment", "LeaderWorkerSet")
    return {
        workload["metadata"]["labels"]["app.kubernetes.io/component"]: workload
        for workload in found
    }


def pod_labels(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    return {
        component: template_of(workload)["metadata"]["labels"]
        for component, workload in workloads(manifests).items()
    }


def container_of(workload: Manifest) -> Manifest:
    [container] = template_of(workload)["spec"]["containers"]
    return container


def command_of(container: Manifest) -> list[str]:
    """What the container runs, without pd-launch."""
    program, *arguments = [*container["command"], *container.get("args", [])]
    assert program == "pd-launch"
    return arguments


def flag(container: Manifest, name: str) -> str:
    """Value of a flag that the container's command has once."""
    [value] = [a.split("=", 1)[1] for a in container["args"] if a.startswith(f"--{name}=")]
    return value


def probes(container: Manifest) -> dict[str, Manifest]:
    return {name: value for name, value in container.items() if name.endswith("Probe")}


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector, or a Service's plain one, matches these labels."""
    if not selector.keys() & {"matchLabels", "matchExpressions"} and selector:
        selector = {"matchLabels": selector}
    assert not selector.get("matchExpressions"), "this test does not know them"
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())


def can_connect(
    manifests: list[Manifest],
    target: dict[str, str],
    port: int,
    source: dict[str, str],
    namespace: dict[str, str] | None = None,
) -> bool:
    """Whether NetworkPolicies let a pod with the labels ``source`` connect to a pod with the labels
    ``target``.

    Args:
        namespace: labels of the source's namespace; None is the release's own.
    """
    policies = [
        policy["spec"]
        for policy in of_kind(manifests, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], target)
    ]
    rules = [rule for policy in policies for rule in policy["ingress"]]
    return not policies or any(_lets_in(rule, port, source, namespace) for rule in rules)


def _lets_in(
    rule: Manifest, port: int, source: dict[str, str], namespace: dict[str, str] | None
) -> bool:
    ports = rule.get("ports")
    if ports and not any(p["port"] <= port <= p.get("endPort", p["port"]) for p in ports):
        return False
    return "from" not in rule or any(_is_peer(peer, source, namespace) for peer in rule["from"])


def _is_peer(peer: Manifest, source: dict[str, str], namespace: dict[str, str] | None) -> bool:
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], namespace or {}):
            return False
    elif namespace is not None:
        return False
    return selects(peer.get("podSelector", {}), source)


def walk_schemas(schema: Any, where: str = "") -> Iterator[tuple[str, Manifest]]:
    """Every schema in a JSON schema that is about objects."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield where, schema
        for key, value in schema.items():
            yield from walk_schemas(value, f"{where}/{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from walk_schemas(value, f"{where}/{index}")
