"""What lies in deploy/ is read by the programs it is for, where they are here, and agrees with the service anyway.

Checkers are looked for in the folders of POSTTRAIN_TEST_TOOLS (separated by colons) and on the PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain_service.settings import Settings


@pytest.fixture
def deploy(repository: Path) -> Path:
    return repository / "deploy"


def run(tool: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    """What the tool prints; skips where it is absent, fails where it finds fault."""
    path = shutil.which(tool, path=os.environ.get("POSTTRAIN_TEST_TOOLS", "") + os.pathsep + os.environ["PATH"])
    if path is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([path, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_prometheus_reads_its_configuration_and_the_alerts_fire_when_they_should(deploy):
    assert "12 rules found" in run("promtool", "check", "config", deploy / "prometheus/prometheus.yml")
    assert "SUCCESS" in run("promtool", "test", "rules", "alerts_test.yml", cwd=deploy / "prometheus")


def test_nginx_reads_the_sample(deploy, tmp_path):
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x", "-keyout", tmp_path / "k", "-out", tmp_path / "c")
    site = (deploy / "nginx.conf").read_text()
    site = site.replace("/etc/nginx/tls/fullchain.pem", str(tmp_path / "c")).replace("/etc/nginx/tls/privkey.pem", str(tmp_path / "k"))
    for port, free in (("listen 80;", "listen 127.0.0.1:48480;"), ("listen 443 ssl;", "listen 127.0.0.1:48443 ssl;")):
        assert port in site
        site = site.replace(port, free)
    temporary = "".join(f"{name}_temp_path {tmp_path / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ access_log off; {temporary} {site} }}")
    assert "test is successful" in run("nginx", "-t", "-e", "stderr", "-p", tmp_path, "-c", tmp_path / "nginx.conf")


def test_the_image_s_recipe(deploy, repository):
    text = (deploy / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        assert all((repository / source).exists() for source in line.split()), line
    assert re.search(r'^ENTRYPOINT \["posttrain"\]$', text, re.M)
    run("hadolint", deploy / "Dockerfile")


def test_systemd_reads_the_unit(deploy, tmp_path):
    text = (deploy / "posttrain.service").read_text()
    assert {"KillMode=process", "Delegate=yes"} <= set(text.splitlines())
    (tmp_path / "posttrain.service").write_text(text.replace("/opt/posttrain/bin/posttrain", "/bin/true"))
    assert "posttrain.service" not in run("systemd-analyze", "verify", tmp_path / "posttrain.service")


def test_kubernetes_reads_the_manifests(deploy):
    manifests = [deploy / "kubernetes" / name for name in load(deploy / "kubernetes/kustomization.yaml")["resources"]]
    assert set(manifests) == set((deploy / "kubernetes").glob("*.yaml")) - {deploy / "kubernetes/kustomization.yaml"}
    service, stateful = map(load, manifests)
    pod = stateful["spec"]["template"]
    assert pod["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert pod["metadata"]["labels"].items() >= stateful["spec"]["selector"]["matchLabels"].items()
    [container] = pod["spec"]["containers"]
    assert {port["name"] for port in container["ports"]} == {service["spec"]["ports"][0]["targetPort"]}
    run("kubernetes-validate", "--strict", *manifests)


def test_variables_are_settings_that_there_are(deploy):
    known = {f"POSTTRAIN_{name.upper()}" for name in Settings.model_fields} | {"POSTTRAIN_STACK_APIS", "POSTTRAIN_STACK_PROVIDERS"}  # of the stacks' samples
    for path in deploy.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            assert set(re.findall(r"\bPOSTTRAIN_[A-Z_]+[A-Z]", path.read_text())) <= known, path


def test_compose_starts_things_in_order_and_mounts_what_is_there(deploy):
    compose = load(deploy / "compose.yaml")
    services = compose["services"]
    assert services["posttrain"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert services["migrate"]["command"] == ["db", "upgrade"]
    assert services["migrate"]["environment"] == services["posttrain"]["environment"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (deploy / source).exists() if source.startswith(".") else source in compose["volumes"], mount
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing but the loopback without a proxy"
        if "build" in service:
            assert (deploy / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_dashboard_has_the_form_that_grafana_reads(deploy):
    board = json.loads((deploy / "grafana/dashboards/posttrain.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 20
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another one"
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])
    [variable] = board["templating"]["list"]
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {f"${{{variable['name']}}}"}
