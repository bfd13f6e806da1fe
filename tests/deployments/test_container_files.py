"""``Dockerfile`` and ``compose.yaml`` fit pd, the chart and each other. Nothing is built here."""

from __future__ import annotations

import fnmatch
import re
import tomllib

import pytest
import yaml
from charts import ROOT, chart, container_of, merge, render, template_of, workloads

from pd.cli import launch_parser
from pd.proxy.config import ProxyConfig

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_the_image_has_a_stage_for_each_device() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M)
    assert stages == ["base-cpu", "base-cuda"]
    assert re.findall(r"^FROM (\S+)$", DOCKERFILE, re.M) == ["base-${DEVICE}"]
    assert re.findall(r"^ARG (.*)$", DOCKERFILE, re.M) == ["DEVICE=cpu"]


def test_the_image_installs_what_the_project_needs() -> None:
    extras = [
        name for line in re.findall(r"PD_EXTRAS=(\S+)", DOCKERFILE) for name in line.split(",")
    ]
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
    [torch] = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert re.findall(r'pip install --no-cache-dir "(torch[^"]*)"', DOCKERFILE) == [torch, torch]


def test_files_that_the_image_copies_are_there_and_let_in() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = [
        name for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for name in line.split()[:-1]
    ]
    assert let_in == set(copied)
    assert all((ROOT / name).exists() for name in copied)
    # setuptools refuses to build without them.
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    assert not any(fnmatch.fnmatch("cluster.key", name) for name in let_in)


def test_the_chart_runs_the_user_and_serves_the_model_of_the_image() -> None:
    [user] = re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.M)
    for workload in workloads(render()).values():
        security = template_of(workload)["spec"]["securityContext"]
        assert security["runAsUser"] == security["runAsGroup"] == int(user)
    assert chart().values["model"]["path"] in DOCKERFILE
    version = yaml.safe_load((ROOT / "deploy/helm/pd/Chart.yaml").read_text())["appVersion"]
    assert version == PROJECT["version"]
    assert f"pd-serve:{version}" in DOCKERFILE
    assert container_of(workloads(render())["proxy"])["image"] == f"pd-serve:{version}"


@pytest.mark.parametrize("name", SERVICES)
def test_services_of_the_compose_file_run_what_pd_understands(name: str) -> None:
    service = SERVICES[name]
    _parser, commands = launch_parser()
    role, *flags = service["command"]
    args = commands[role].parse_args(flags)
    assert role == name
    assert f":{args.port}/" in service["healthcheck"]["test"][-1]
    assert str(args.cluster_key_file) == f"/run/secrets/{service['secrets'][0]}"
    assert service["secrets"] == list(COMPOSE["secrets"])
    assert args.host == "0.0.0.0"
    assert float(service["stop_grace_period"].removesuffix("s")) > ProxyConfig().drain_timeout + 10
    if name == "proxy":
        for url in (*args.prefill, *args.decode):
            host, port = re.fullmatch(r"http://(\w+):(\d+)", url).groups()
            assert f"--advertise-host={host}" in SERVICES[host]["command"]
            assert f"--port={port}" in SERVICES[host]["command"]
        assert service["ports"] == [f"127.0.0.1:{args.port}:{args.port}"], "not for the network"
        assert service["environment"]["PD_API_KEY"].startswith("${PD_API_KEY:?")
    else:
        assert "ports" not in service
        mounted = service["volumes"][0].rpartition(":")[0].rpartition(":")[2]
        assert args.model == mounted


@pytest.mark.parametrize("page", ["docs/cluster.md", "deploy/helm/README.md"])
def test_documented_values_are_those_of_the_chart(page: str) -> None:
    text = (ROOT / page).read_text()
    settings = re.findall(r"--set ([\w.]+)=([^\s`]+)", text)
    blocks = [b for b in re.findall(r"```yaml\n(.*?)```", text, re.S) if b.startswith("image:")]
    assert settings or blocks
    values = [yaml.safe_load(block) for block in blocks]
    for path, value in settings:
        layer = yaml.safe_load(value)
        for key in reversed(path.split(".")):
            layer = {key: layer}
        values.append(layer)
    render(merge(*values))


def test_links_of_the_chart_s_page_lead_somewhere() -> None:
    page = ROOT / "deploy/helm/README.md"
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target
        titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
        anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
        assert not anchor or anchor in anchors, f"{target}#{anchor}"
