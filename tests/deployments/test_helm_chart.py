"""The chart in ``deploy/helm/pd``: its manifests are valid, fit each other and pd, and its commands
serve. No cluster is asked; that the chart works on one is not shown here."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import time
from typing import TYPE_CHECKING, Any

import helm_python as helm
import httpx
import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from charts import (
    CHART,
    NAMESPACE,
    NEEDED,
    NEWEST,
    OLDEST,
    RELEASE,
    ROOT,
    can_connect,
    chart,
    check_manifest,
    command_of,
    container_of,
    flag,
    merge,
    of_kind,
    pod_labels,
    probes,
    render,
    selects,
    template_of,
    walk_schemas,
    workloads,
)
from covering import every_two
from processes import Process, free_port
from prometheus_client.parser import text_string_to_metric_families
from tiny import tiny_model

from pd.cli import launch, launch_parser
from pd.commands.servers import list_server_flags
from pd.proxy.nodes.discovery import flag as discovery_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from charts import Manifest

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
README = ROOT / "deploy/helm/README.md"
ON_KUBERNETES = (ROOT / "docs/cluster.md").read_text().partition("\n## On Kubernetes\n")[2]
NODES = ("prefill", "decode")
# Flags that the chart gives, or whose secrets do not belong into values.
OF_CHART = {
    *("config", "model", "host", "advertise-host", "port", "bootstrap-port", "cluster-key-file"),
    *("drain-timeout", "device", "tp-size", "fake-script", "prefill", "decode", "unified"),
    *("discover", "api-key", "admin-api-key", "api-keys", "tls-cert", "tls-key"),
}
STRANGER = {"app.kubernetes.io/name": "shop"}
CONTEXT = 12288  # for streams that do not end before a test has looked at them
MESSAGE_PORT = 41234  # any that the kernel picks


def _of_nodes(values: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(NODES, values)


COLUMNS: dict[str, list[dict[str, Any]]] = {
    "discovery": [{}, {"discovery": {"kind": "kubernetes"}}],
    "keys": [{}, {"clusterKey": {"existingSecret": "", "value": "ab12" * 16}}],
    "clients": [
        {},
        {"apiKeys": {"existingSecret": "", "value": "inference 1234\nadmin 5678 ops\n"}},
        {"apiKeys": {"existingSecret": "", "allowEverybody": True}},
    ],
    "groups": [
        {},
        {"decode": {"group": {"enabled": True, "size": 4, "topologyKey": "example.org/rack"}}},
        _of_nodes({"group": {"enabled": True}}),
    ],
    "scaling": [
        {},
        _of_nodes({"autoscaling": {"kind": "hpa"}}),
        _of_nodes({"autoscaling": {"kind": "keda", "maxReplicas": 32}}),
    ],
    "gpus": [
        {},
        _of_nodes({"gpus": {"count": 1}, "runtimeClassName": "nvidia"}),
        {"decode": {"gpus": {"count": 4, "resource": "amd.com/gpu"}, "shmSize": "16Gi"}},
    ],
    "resources": [
        {},
        {
            **_of_nodes({"resources": {"limits": {"memory": "64Gi"}, "requests": {"cpu": 8}}}),
            "proxy": {"resources": {"requests": {"cpu": "500m", "memory": "2Gi"}}},
        },
    ],
    "https": [{}, {"proxy": {"tls": {"secretName": "our-certificate"}}}],
    "fence": [
        {},
        {"networkPolicy": {"enabled": False}},
        {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]}},
        {"networkPolicy": {"monitoring": [], "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
    ],
    "metrics": [{}, {"metrics": {"serviceMonitor": {"enabled": True, "labels": {"team": "llm"}}}}],
    "model": [
        {},
        {
            "model": {
                "path": "/models/m",
                "volume": {"persistentVolumeClaim": {"claimName": "models"}},
            }
        },
        {
            "model": {
                "path": "/data/m",
                "mountPath": "/data",
                "volume": {"hostPath": {"path": "/m"}},
            }
        },
        {
            "model": {
                "path": "/models/m",
                "volume": {"nfs": {"server": "10.0.0.9", "path": "/m", "readOnly": True}},
            }
        },
    ],
    "flags": [
        {},
        {
            "prefill": {"flags": {"kv-cache-tokens": 1_000_000, "mem-fraction": 0.85}},
            "decode": {"flags": {"elastic": "auto", "kv-digest": True, "trust-network": False}},
            "proxy": {"flags": {"cors-origins": ["https://a.example", "https://b.example"]}},
        },
    ],
    "placement": [
        {},
        {
            "image": {"pullSecrets": ["registry"], "tag": "1.2-cuda"},
            **{
                name: {
                    "nodeSelector": {"gpu": "h200"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "priorityClassName": "high",
                    "podLabels": {"team": "llm"},
                    "podAnnotations": {"example.org/note": "any text"},
                    "env": [{"name": "UCX_TLS", "value": "tcp"}],
                }
                for name in (*NODES, "proxy")
            },
        },
    ],
    "service": [
        {},
        {"proxy": {"service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}}}},
    ],
    "disruption": [{}, _of_nodes({"podDisruptionBudget": {"enabled": False}, "spreadOver": ""})],
}


def _random_cells(number: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    sizes = [range(len(choices)) for choices in COLUMNS.values()]
    return [tuple(rng.choice(size) for size in sizes) for _ in range(number)]


def _values(cell: tuple[int, ...]) -> dict[str, Any]:
    return merge(*(choices[i] for i, choices in zip(cell, COLUMNS.values(), strict=True)))


EVERY_TWO = every_two(_random_cells(600, seed=1), seed=1)


def check_release(manifests: list[Manifest], values: dict[str, Any]) -> None:
    """All that must hold whatever the values are."""
    for manifest, version in itertools.product(manifests, (OLDEST, NEWEST)):
        check_manifest(manifest, version)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))
    assert workloads(manifests).keys() == {*NODES, "proxy"}
    for component, workload in workloads(manifests).items():
        check_command(component, container_of(workload))
        check_ports(container_of(workload))
        check_volumes(manifests, template_of(workload)["spec"], merge(values))
        check_ends_after_drain(workload)
        check_is_confined(template_of(workload)["spec"])
    check_selectors(manifests)
    check_references(manifests)


def check_command(component: str, container: Manifest) -> None:
    arguments = command_of(container)
    assert arguments[0] == component
    flags = [argument.removeprefix("--").partition("=")[0] for argument in arguments[1:]]
    assert set(flags) <= set(list_server_flags()[component])
    assert set(flags).isdisjoint({"api-key", "admin-api-key"}), "others see command lines"
    _parser, commands = launch_parser()
    as_run = [argument.replace("$(POD_IP)", "10.1.2.3") for argument in arguments[1:]]
    args = commands[component].parse_args(as_run)
    if component in NODES:
        addresses = [e for e in container["env"] if e["name"] == "POD_IP"]
        assert addresses == [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        ]
        assert (args.host, args.advertise_host) == ("0.0.0.0", "10.1.2.3")


def check_ports(container: Manifest) -> None:
    """Ports of flags, of the container, of probes and of preStop are the same."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports.pop("http") == int(flag(container, "port"))
    if "bootstrap" in ports:
        assert ports.pop("bootstrap") == int(flag(container, "bootstrap-port"))
    assert not ports
    for probe in probes(container).values():
        assert probe.get("httpGet", probe.get("tcpSocket"))["port"] == "http"
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    if hook[0] == "pd-launch":
        _program, *arguments = hook
        parser, _commands = launch_parser()
        args = parser.parse_args(arguments)
        assert args.action == "migrate"
        assert args.url == f"http://127.0.0.1:{flag(container, 'port')}"
        assert str(args.cluster_key_file) == flag(container, "cluster-key-file")
    https = any(argument.startswith("--tls-cert=") for argument in container["args"])
    gets = [probe["httpGet"] for probe in probes(container).values() if "httpGet" in probe]
    assert all((get.get("scheme") == "HTTPS") is https for get in gets)


def check_volumes(manifests: list[Manifest], spec: Manifest, values: dict[str, Any]) -> None:
    """Mounts have volumes, files of flags are in mounts, and Secrets have the keys."""
    [container] = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(volumes) == len(spec["volumes"]) == len(mounts), "each is mounted once"
    secrets = {secret["metadata"]["name"]: secret for secret in of_kind(manifests, "Secret")}
    chosen = {"our-certificate"}
    for name in ("clusterKey", "apiKeys"):
        chosen.add(merge(NEEDED, values)[name]["existingSecret"])
    for volume in volumes.values():
        if "secret" in volume:
            secret = volume["secret"]
            assert secret["defaultMode"] == 0o400
            if secret["secretName"] in secrets:
                made = secrets[secret["secretName"]]["stringData"]
                assert {item["key"] for item in secret["items"]} <= made.keys()
            else:
                assert secret["secretName"] in chosen
    for argument in container["args"]:
        _name, _equals, path = argument.partition("=")
        if path.startswith("/etc/"):
            directory, _slash, file = path.rpartition("/")
            secret = mounts[directory]["secret"]
            files = [item["path"] for item in secret.get("items", [])] or ["tls.crt", "tls.key"]
            assert file in files
        elif argument.startswith("--model="):
            mounted = [mount for mount, volume in mounts.items() if volume["name"] == "model"]
            assert [path] == ([f"{mount}/m" for mount in mounted] or [DEFAULTS["model"]["path"]])


def check_ends_after_drain(workload: Manifest) -> None:
    container = container_of(workload)
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    # A hook that waits in vain for an answer of the node takes its time-out, and a start of Python.
    before = float(hook[1]) if hook[0] == "sleep" else 15.0
    grace = template_of(workload)["spec"]["terminationGracePeriodSeconds"]
    assert grace >= before + float(flag(container, "drain-timeout")) + 10


def check_is_confined(spec: Manifest) -> None:
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["enableServiceLinks"] is False, "a service called pd-api would set PD_API_…"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)


def check_selectors(manifests: list[Manifest]) -> None:
    labels = pod_labels(manifests)

    def selected(selector: Manifest) -> set[str]:
        return {component for component, own in labels.items() if selects(selector, own)}

    for component, workload in workloads(manifests).items():
        if workload["kind"] == "Deployment":
            assert selected(workload["spec"]["selector"]) == {component}
        spread = template_of(workload)["spec"].get("topologySpreadConstraints", [])
        assert all(selected(constraint["labelSelector"]) == {component} for constraint in spread)
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        component = budget["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selected(budget["spec"]["selector"]) == {component}
    for service in of_kind(manifests, "Service"):
        headless = service["spec"].get("clusterIP") == "None"
        assert selected(service["spec"]["selector"]) == (set(NODES) if headless else {"proxy"})
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    for monitor in of_kind(manifests, "ServiceMonitor"):
        [service] = _monitored(manifests, monitor)
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


def _monitored(manifests: list[Manifest], monitor: Manifest) -> list[Manifest]:
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    return [
        service
        for service in of_kind(manifests, "Service")
        if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    ]


def check_references(manifests: list[Manifest]) -> None:
    """Scalers, bindings, accounts and discovery name what is there."""
    names = {
        (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
        for manifest in manifests
    }
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"], target["name"]) in names
    scaled = {
        s["metadata"]["name"] for s in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    }
    for workload in workloads(manifests).values():
        assert ("replicas" in workload["spec"]) is (workload["metadata"]["name"] not in scaled)
    proxy = workloads(manifests)["proxy"]
    kind, _, where = flag(container_of(proxy), "discover").partition(":")
    [nodes] = [s for s in of_kind(manifests, "Service") if s["spec"].get("clusterIP") == "None"]
    if kind == "dns":
        name, _, port = where.rpartition(":")
        assert name == f"{nodes['metadata']['name']}.{NAMESPACE}.svc.cluster.local."
        assert int(port) == nodes["spec"]["ports"][0]["port"]
        assert not of_kind(manifests, "Role", "RoleBinding", "ServiceAccount")
    else:
        assert kind == "kubernetes"
        wanted = dict(pair.split("=") for pair in where.split(","))
        services = [
            s for s in of_kind(manifests, "Service") if selects(wanted, s["metadata"]["labels"])
        ]
        assert services == [nodes], "EndpointSlices have the labels of their Service"
        [account] = of_kind(manifests, "ServiceAccount")
        [role], [binding] = of_kind(manifests, "Role"), of_kind(manifests, "RoleBinding")
        assert template_of(proxy)["spec"]["serviceAccountName"] == account["metadata"]["name"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [
            {
                "kind": "ServiceAccount",
                "name": account["metadata"]["name"],
                "namespace": NAMESPACE,
            }
        ]
        [rule] = role["rules"]
        assert rule["resources"] == ["endpointslices"]
        assert set(rule["verbs"]) == {"get", "list", "watch"}


DEFAULTS = chart().values


@pytest.mark.parametrize("cell", EVERY_TWO, ids=lambda cell: "".join(map(str, cell)))
def test_manifests_are_valid_and_fit_each_other(cell: tuple[int, ...]) -> None:
    check_release(render(_values(cell)), _values(cell))


@pytest.mark.full
def test_random_combinations_of_values_are_valid() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    for cell in _random_cells(300, seed):
        check_release(render(_values(cell)), _values(cell))


def test_an_unknown_kind_or_field_or_a_wrong_type_is_found() -> None:
    [deployment, *_] = of_kind(render(), "Deployment")
    check_manifest(deployment, NEWEST)
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check_manifest(deployment | {"kind": "Deploymint"}, NEWEST)
    for field, value in (("replcas", 1), ("replicas", "1")):
        with pytest.raises(kubernetes_validate.ValidationError):
            check_manifest(merge(deployment, {"spec": {field: value}}), NEWEST)
    scaled = render(
        merge(
            _of_nodes({"autoscaling": {"kind": "keda"}, "group": {"enabled": True}}),
            COLUMNS["metrics"][1],
        )
    )
    for kind in ("ScaledObject", "LeaderWorkerSet", "ServiceMonitor"):
        custom = of_kind(scaled, kind)[0]
        check_manifest(custom, NEWEST)
        with pytest.raises(jsonschema.ValidationError):
            check_manifest(merge(custom, {"spec": {"replcas": 1}}), NEWEST)
    template = template_of(of_kind(scaled, "LeaderWorkerSet")[0])
    template["spec"]["hostnetwork"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        check_manifest(of_kind(scaled, "LeaderWorkerSet")[0], NEWEST)
    del template["spec"]["hostnetwork"]


def test_the_versions_checked_are_those_claimed() -> None:
    claimed = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert claimed == f">={OLDEST}.0-0"
    assert f"Kubernetes {OLDEST} to {NEWEST}" in README.read_text()


def test_the_chart_passes_the_linter() -> None:
    report = helm.lint(CHART, merge(NEEDED), strict=True)
    assert not report["errors"]
    assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


# What values may be


def test_every_object_of_the_schema_refuses_unknown_keys() -> None:
    schemas = dict(walk_schemas(SCHEMA))
    assert len(schemas) > 30
    assert [
        where
        for where, schema in schemas.items()
        if schema.get("additionalProperties") is not False
    ] == []


def _places(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict):
        yield path
        for key, value in values.items():
            yield from _places(value, (*path, key))


@pytest.mark.parametrize(
    "place", list(_places(DEFAULTS)), ids=lambda place: ".".join(place) or "top"
)
def test_an_unknown_value_is_refused_in_every_place(place: tuple[str, ...]) -> None:
    unknown: dict[str, Any] = {"no such value": "1"}
    for key in reversed(place):
        unknown = {key: unknown}
    with pytest.raises(helm.HelmValuesError, match="no such value"):
        chart().render(merge(NEEDED, unknown), name=RELEASE)


@pytest.mark.parametrize(
    "values",
    [
        {"prefill": {"flags": {"kv-cache-token": 1}}},
        {"prefill": {"flags": {"cluster-key-file": "/x"}}},
        {"prefill": {"flags": {"host": "127.0.0.1"}}},
        {"proxy": {"flags": {"api-key": "secret"}}},
        {"prefill": {"replicas": "2"}},
        {"prefill": {"replicas": -1}},
        {"proxy": {"replicas": 0}},
        {"decode": {"autoscaling": {"kind": "HPA"}}},
        {"decode": {"drainSeconds": 0}},
        {"decode": {"podLabels": {"app.kubernetes.io/component": "proxy"}}},
        {"decode": {"resources": {"limits": {"memory": "64 GB"}}}},
        {"model": {"path": "relative"}},
        {"model": {"volume": {"hostPath": {"path": "/m"}, "nfs": {"server": "a", "path": "/m"}}}},
        {"clusterKey": {"value": "too short"}},
        {"metrics": {"prometheusAddress": "prometheus"}},
        {"networkPolicy": {"clients": [{}]}},
        {"discovery": {"kind": "file"}},
    ],
    ids=json.dumps,
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        chart().render(merge(NEEDED, values), name=RELEASE)


@pytest.mark.parametrize("name", NEEDED)
def test_a_release_without_keys_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(helm.HelmError, match=rf"{name}\.existingSecret or {name}\.value"):
        render({name: {"existingSecret": ""}})


def test_a_model_outside_of_its_volume_is_refused() -> None:
    with pytest.raises(
        helm.HelmError, match=r"model\.path /opt/pd/embedded is not in model\.mountPath"
    ):
        render({"model": {"volume": {"hostPath": {"path": "/m"}}}})


@pytest.mark.parametrize("component", [*NODES, "proxy"])
def test_values_take_the_flags_of_the_parser_but_those_of_the_chart(component: str) -> None:
    flags = SCHEMA["properties"][component]["properties"]["flags"]["properties"]
    ours = set(list_server_flags()[component]) - OF_CHART
    assert set(flags) == ours, "add or remove flags in values.schema.json"


def test_flags_arrive_as_they_were_written() -> None:
    containers = {
        component: container_of(workload)
        for component, workload in workloads(render(COLUMNS["flags"][1])).items()
    }
    assert flag(containers["prefill"], "kv-cache-tokens") == "1000000"
    assert flag(containers["prefill"], "mem-fraction") == "0.85"
    assert "--kv-digest" in containers["decode"]["args"]
    assert "trust-network" not in str(containers["decode"]["args"])
    assert [a for a in containers["proxy"]["args"] if "cors" in a] == [
        "--cors-origins=https://a.example",
        "--cors-origins=https://b.example",
    ]


def test_long_names_of_releases_stay_apart_and_leave_room_for_controllers() -> None:
    releases = ["a" * 52 + last for last in "xy"]
    found = []
    for release in releases:
        files = chart().render(merge(NEEDED, _of_nodes({"group": {"enabled": True}})), name=release)
        loaded = [yaml.safe_load_all(text) for name, text in files.items() if name.endswith("yaml")]
        found.append({m["metadata"]["name"] for m in itertools.chain(*loaded) if m})
    assert found[0].isdisjoint(found[1])
    # A StatefulSet adds a hash of ten characters, and its name is the value of a label.
    assert max(map(len, set.union(*found))) <= 52


def test_gpus_are_limits_and_ranks() -> None:
    limits = {"resources": {"limits": {"memory": "64Gi"}}, "gpus": {"count": 4}}
    container = container_of(workloads(render({"decode": limits}))["decode"])
    assert container["resources"] == {"limits": {"memory": "64Gi", "nvidia.com/gpu": "4"}}
    assert flag(container, "tp-size") == "4"
    assert flag(container, "device") == "cuda", "a pod without its GPUs must not serve on CPUs"
    on_cpu = container_of(workloads(render())["decode"])
    assert "resources" not in on_cpu
    assert "--tp-size" not in str(on_cpu["args"])


@pytest.mark.parametrize("kind", ["dns", "kubernetes"])
def test_the_proxy_understands_where_nodes_are_found(kind: str) -> None:
    proxy = workloads(render({"discovery": {"kind": kind}}))["proxy"]
    with _inside_a_cluster(kind):
        discovery_flag.parse_source(flag(container_of(proxy), "discover"))


@contextlib.contextmanager
def _inside_a_cluster(kind: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "kubernetes":
            patch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            patch.setenv("KUBERNETES_SERVICE_PORT", "6443")
        yield


# Who reaches which port


def test_only_pods_of_the_release_reach_message_bootstrap_and_transfer_ports() -> None:
    manifests = render()
    labels = pod_labels(manifests)
    other_release = labels["decode"] | {"app.kubernetes.io/instance": "other"}
    for target in NODES:
        for port in (30000, 8998, MESSAGE_PORT):
            for source in (*NODES, "proxy"):
                assert can_connect(manifests, labels[target], port, labels[source])
            for source in (STRANGER, {}, other_release):
                assert not can_connect(manifests, labels[target], port, source)
            # Labels are of no use in another namespace.
            assert not can_connect(manifests, labels[target], port, labels["proxy"], {"name": "x"})


def test_monitoring_reaches_metrics_and_nothing_else() -> None:
    manifests = render()
    labels = pod_labels(manifests)
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    for target in NODES:
        assert can_connect(manifests, labels[target], 30000, STRANGER, monitoring)
        for port in (8998, MESSAGE_PORT):
            assert not can_connect(manifests, labels[target], port, STRANGER, monitoring)


def test_the_proxy_is_for_everybody_or_for_chosen_clients() -> None:
    for values, expected in ((COLUMNS["fence"][0], True), (COLUMNS["fence"][2], False)):
        manifests = render(values)
        proxy = pod_labels(manifests)["proxy"]
        assert can_connect(manifests, proxy, 8000, STRANGER) is expected
        assert can_connect(manifests, proxy, 8000, {"app": "web"})
        assert not can_connect(manifests, proxy, MESSAGE_PORT, {"app": "web"})
        monitoring = {"kubernetes.io/metadata.name": "monitoring"}
        assert can_connect(manifests, proxy, 8000, STRANGER, monitoring)


def test_secrets_of_the_operator_are_in_secrets_only() -> None:
    key, clients = "5ec2e7" * 8, "inference c11e47-0123456789\n"
    manifests = render(
        {
            "clusterKey": {"existingSecret": "", "value": key},
            "apiKeys": {"existingSecret": "", "value": clients},
        }
    )
    texts = {
        manifest["kind"]: json.dumps(manifest)
        for manifest in manifests
        if manifest["kind"] != "Secret"
    }
    assert [kind for kind, text in texts.items() if key in text or "c11e47" in text] == []
    made = {s["metadata"]["name"]: s["stringData"] for s in of_kind(manifests, "Secret")}
    assert made == {
        f"{RELEASE}-pd-cluster-key": {"cluster.key": key},
        f"{RELEASE}-pd-api-keys": {"api-keys": clients},
    }


# What the containers run


class Pods:
    """Containers of a release as processes of this host, on the loopback address."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        quick = {"flags": {"load-format": "dummy", "kv-cache-tokens": 16384}}
        self.manifests = render(
            {**_of_nodes(quick), "metrics": {"serviceMonitor": {"enabled": True}}}
        )
        self.workloads = workloads(self.manifests)
        self.nodes = directory / "nodes"
        self.nodes.write_text("")
        secrets = {
            "our-key": {"cluster.key": "5ec2e7" * 10},
            "our-clients": {"api-keys": "inference k\n"},
        }
        self.files = {c: self._mount(c, secrets) for c in self.workloads}
        self.ports = {component: free_port() for component in self.workloads}
        self.processes: dict[str, Process] = {}

    def _mount(self, component: str, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
        """Write the Secrets that a pod mounts; returns directories by mount path."""
        spec = template_of(self.workloads[component])["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        found = {}
        for mount in container_of(self.workloads[component])["volumeMounts"]:
            if secret := volumes[mount["name"]].get("secret"):
                directory = self.directory / component / mount["name"]
                directory.mkdir(parents=True)
                for item in secret["items"]:
                    file = directory / item["path"]
                    file.write_text(secrets[secret["secretName"]][item["key"]])
                    file.chmod(secret["defaultMode"])
                found[mount["mountPath"]] = str(directory)
        return found

    def local(self, component: str, arguments: list[str]) -> list[str]:
        """A command of a container with the addresses, ports and directories of this host."""
        container = container_of(self.workloads[component])
        port = self.ports[component]
        changed = {
            flag(container, "host"): "127.0.0.1",
            "$(POD_IP)": "127.0.0.1",
            f"--port={flag(container, 'port')}": f"--port={port}",
            f"127.0.0.1:{flag(container, 'port')}": f"127.0.0.1:{port}",
            "--bootstrap-port=8998": "--bootstrap-port=0",
            DEFAULTS["model"]["path"]: str(tiny_model(max_position_embeddings=CONTEXT)),
            **self.files[component],
        }
        if component == "proxy":
            changed[flag(container, "discover")] = f"file:{self.nodes}"
        for old, new in changed.items():
            arguments = [argument.replace(old, new) for argument in arguments]
        return arguments

    def start(self, component: str, name: str = "") -> Process:
        command = self.local(component, command_of(container_of(self.workloads[component])))
        process = Process(*command, log=self.directory / f"{name or component}.log")
        self.processes[name or component] = process
        return process

    def url(self, component: str) -> str:
        return f"http://127.0.0.1:{self.ports[component]}"

    def status(self, component: str, probe: str) -> int:
        get = probes(container_of(self.workloads[component]))[probe]["httpGet"]
        try:
            return httpx.get(self.url(component) + get["path"], timeout=30).status_code
        except httpx.TransportError:
            return 0

    def wait_for(self, component: str, probe: str, status: int) -> None:
        deadline = time.monotonic() + 120
        while self.status(component, probe) != status:
            assert time.monotonic() < deadline, (component, probe, self.status(component, probe))
            time.sleep(0.1)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    pods = Pods(tmp_path_factory.mktemp("pods"))
    try:
        for component in pods.workloads:
            pods.start(component)
        yield pods
    finally:
        for process in pods.processes.values():
            process.stop()


@pytest.fixture(scope="module")
def scrapes(pods: Pods) -> dict[str, dict[str, list[dict[str, str]]]]:
    """What Prometheus reads of each component after a request: labels of each series by name."""
    pods.wait_for("proxy", "startupProbe", 200)
    if pods.nodes.read_text() == "":
        assert pods.status("proxy", "readinessProbe") == 503, "no node is listed yet"
    for component in NODES:
        for probe in ("startupProbe", "readinessProbe"):
            pods.wait_for(component, probe, 200)
    pods.nodes.write_text("".join(f"{pods.url(component)}\n" for component in NODES))
    pods.wait_for("proxy", "readinessProbe", 200)
    pods.wait_for("proxy", "livenessProbe", 200)
    answer = httpx.post(
        f"{pods.url('proxy')}/generate",
        json={"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}},
        headers={"Authorization": "Bearer k"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    found = {}
    for component in pods.workloads:
        series: dict[str, list[dict[str, str]]] = {}
        path = {
            endpoint["path"]
            for monitor in of_kind(pods.manifests, "ServiceMonitor")
            for endpoint in monitor["spec"]["endpoints"]
        }.pop()
        for family in text_string_to_metric_families(httpx.get(pods.url(component) + path).text):
            for sample in family.samples:
                series.setdefault(sample.name, []).append(sample.labels)
        found[component] = series
    return found


def _target_labels(manifests: list[Manifest], component: str) -> dict[str, str | None]:
    """Labels that Prometheus adds to the series of a component's pods; None where the value is not
    known here."""
    [monitor] = [
        monitor
        for monitor in of_kind(manifests, "ServiceMonitor")
        if any(
            selects(service["spec"]["selector"], pod_labels(manifests)[component])
            for service in _monitored(manifests, monitor)
        )
    ]
    [service], [endpoint] = _monitored(manifests, monitor), monitor["spec"]["endpoints"]
    name = service["metadata"]["name"]
    labels: dict[str, str | None] = dict.fromkeys(("pod", "instance", "container"))
    labels |= {"namespace": NAMESPACE, "service": name, "job": name, "endpoint": "http"}
    for label in monitor["spec"]["podTargetLabels"]:
        labels[re.sub(r"\W", "_", label)] = pod_labels(manifests)[component][label]
    for rule in endpoint["relabelings"]:
        assert rule["action"] == "labeldrop"
        del labels[rule["regex"]]
    return labels


def _selectors(query: str) -> list[promql_parser.VectorSelector]:
    found = []

    def collect(expression: Any) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            found.append(expression)
        for name in ("expr", "lhs", "rhs", "vs", "vector_selector"):
            inner = getattr(expression, name, None)
            if inner is not None and not isinstance(inner, str):
                collect(inner)
        for inner in getattr(expression, "args", None) or []:
            collect(inner)

    collect(promql_parser.parse(query))
    return found


def _documented_queries() -> list[str]:
    texts = README.read_text() + ON_KUBERNETES
    return [
        q
        for block in re.findall(r"```promql\n(.*?)```", texts, re.DOTALL)
        for q in block.splitlines()
        if q
    ]


def check_query(query: str, scrapes: Any, manifests: list[Manifest]) -> None:
    """Raise AssertionError unless every selector finds series in a scrape of some component."""
    selectors = _selectors(query)
    assert selectors, query
    for selector in selectors:
        found = [
            component
            for component, series in scrapes.items()
            for labels in series.get(selector.name, [])
            if _finds(selector, labels, _target_labels(manifests, component))
        ]
        assert found, f"no series of a scrape is found by {selector}"


def _finds(
    selector: promql_parser.VectorSelector, own: dict[str, str], added: dict[str, str | None]
) -> bool:
    for matcher in selector.matchers.matchers:
        assert matcher.name in own or matcher.name in added, f"no label {matcher.name} in {own}"
        value = own.get(matcher.name, added.get(matcher.name))
        if value is not None and not re.fullmatch(matcher.value, value):
            return False
    return True


def test_scraped_labels_do_not_collide_with_those_of_prometheus(pods: Pods, scrapes: Any) -> None:
    """Prometheus would rename them, and no query would find them."""
    for component, series in scrapes.items():
        own = {label for labels in itertools.chain(*series.values()) for label in labels}
        assert own.isdisjoint(_target_labels(pods.manifests, component)), component
    proxy = {label for labels in itertools.chain(*scrapes["proxy"].values()) for label in labels}
    assert "endpoint" in proxy, "so its relabeling is needed"


@pytest.mark.parametrize("groups", [False, True])
def test_autoscaling_follows_series_that_a_scrape_has(
    pods: Pods, scrapes: Any, groups: bool
) -> None:
    group = {"group": {"enabled": groups, "size": 3}}
    keda = of_kind(render(_of_nodes({"autoscaling": {"kind": "keda"}, **group})), "ScaledObject")
    hpa = of_kind(
        render(_of_nodes({"autoscaling": {"kind": "hpa"}, **group})), "HorizontalPodAutoscaler"
    )
    for component, scaled, horizontal in zip(NODES, keda, hpa, strict=True):
        [trigger] = scaled["spec"]["triggers"]
        check_query(trigger["metadata"]["query"], scrapes, pods.manifests)
        [selector] = _selectors(trigger["metadata"]["query"])
        wanted = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert wanted["app_kubernetes_io_component"] == component
        per_node = DEFAULTS[component]["autoscaling"]["requestsPerNode"]
        assert int(trigger["metadata"]["threshold"]) == per_node * (3 if groups else 1)
        [metric] = [metric["pods"] for metric in horizontal["spec"]["metrics"]]
        [expression] = metric["metric"]["selector"]["matchExpressions"]
        scraped = [
            labels[expression["key"]] for labels in scrapes[component][metric["metric"]["name"]]
        ]
        assert set(expression["values"]) <= set(scraped)
        assert "|".join(expression["values"]) == wanted["queue"]


def test_documented_queries_find_series_of_a_scrape(pods: Pods, scrapes: Any) -> None:
    queries = _documented_queries()
    assert len(queries) >= 4
    for query in queries:
        check_query(query, scrapes, pods.manifests)


def test_a_query_for_a_series_or_label_that_is_not_there_is_found(pods: Pods, scrapes: Any) -> None:
    for query in (
        "sum(pd_queue_lengths)",
        'rate(pd_steps_total{queue="waiting"}[5m])',
        'max(pd_queue_length{queue="waitin"})',
        'pd_queue_length{queue="waiting", service="other"} / pd_pages',
    ):
        with pytest.raises(AssertionError):
            check_query(query, scrapes, pods.manifests)


def _running(url: str) -> bool:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return 'pd_queue_length{queue="running"} 1.0' in text


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_pre_stop_moves_a_stream_to_another_pod_and_the_client_sees_nothing(
    pods: Pods, scrapes: Any
) -> None:
    decode = workloads(pods.manifests)["decode"]
    _program, *hook = container_of(decode)["lifecycle"]["preStop"]["exec"]["command"]
    before = pods.ports["decode"]
    pods.ports["decode"] = free_port()
    other = pods.start("decode", "another")
    pods.wait_for("decode", "readinessProbe", 200)
    with pods.nodes.open("a") as file:
        file.write(f"{pods.url('decode')}\n")
    _wait_until(
        lambda: (
            httpx.get(f"{pods.url('proxy')}/metrics").text.count('worker_up{role="decode"') == 2
        ),
        "the proxy finds the new pod",
    )
    ports = (before, pods.ports["decode"])
    body = {"input_ids": [5, 6, 7], "stream": True}
    body["sampling_params"] = {"max_new_tokens": CONTEXT - 100, "ignore_eos": True}
    moved = 'pd_proxy_failovers_total{outcome="moved"} 1.0'
    busy = moved_at = 0
    with httpx.stream(
        "POST",
        f"{pods.url('proxy')}/generate",
        json=body,
        headers={"Authorization": "Bearer k"},
        timeout=120,
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for line in lines:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event
            tokens = event["output_ids"]
            if not busy and len(tokens) > 3:
                [busy] = [port for port in ports if _running(f"http://127.0.0.1:{port}")]
                pods.ports["decode"] = busy
                assert launch(pods.local("decode", hook)) == 0
            elif busy and not moved_at and moved in httpx.get(f"{pods.url('proxy')}/metrics").text:
                moved_at = len(tokens)
            elif moved_at and len(tokens) > moved_at + 50:
                break
    assert moved_at
    # The other tests go on with the pod that is left.
    pods.ports["decode"] = ports[1 - ports.index(busy)]
    if busy == ports[1]:
        other.stop()
        del pods.processes["another"]
    else:
        pods.processes.pop("decode").stop()
        pods.processes["decode"] = pods.processes.pop("another")


def test_containers_serve_migrate_before_they_stop_and_end(pods: Pods, scrapes: Any) -> None:
    """Last of the tests that use the processes: it ends them."""
    for component in NODES:
        container = container_of(pods.workloads[component])
        program, *hook = container["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "pd-launch"
        assert launch(pods.local(component, hook)) == 0
        pods.wait_for(component, "readinessProbe", 503)
        assert pods.processes[component].child.poll() is None, "it ends with SIGTERM only"
    pods.wait_for("proxy", "readinessProbe", 503)
    assert pods.status("proxy", "livenessProbe") == 200, "and is not restarted for want of nodes"
    for process in pods.processes.values():
        process.child.terminate()
    assert [process.child.wait(60) for process in pods.processes.values()] == [0, 0, 0]
