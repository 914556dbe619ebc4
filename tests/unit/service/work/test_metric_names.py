"""The metrics that are documented, drawn and watched are those that the service tells."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

NAME = re.compile(r"\bposttrain_[a-z0-9_]+")


@pytest.fixture
def told(bench) -> set[str]:
    """Names of all own metrics, as they are written in documents: counters with `_total`, histograms without a suffix."""
    body, _ = bench.runtime.services.health.metrics("")
    families = [family for family in parse(body.decode()) if family.name.startswith("posttrain_")]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def test_every_metric_is_documented_and_every_documented_one_is_told(told, repository):
    text = (repository / "docs/observability.md").read_text()
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `posttrain_"))
    assert set(NAME.findall(table)) == told
    assert set(NAME.findall(text)) <= told | {"posttrain_service"}


def expressions(repository, kind):
    if kind == "grafana":
        board = json.loads((repository / "deploy/grafana/dashboards/posttrain.json").read_text())
        return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    groups = yaml.safe_load((repository / "deploy/prometheus/alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("kind", ["grafana", "alerts"])
def test_dashboard_and_alerts_name_only_metrics_that_are_told(told, repository, kind):
    found = {name for expression in expressions(repository, kind) for name in NAME.findall(expression)}
    assert len(found) >= 8
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in found} <= told
    if kind == "grafana":  # and everything that is told is drawn
        assert {re.sub("_(bucket|count|sum)$", "", name) for name in found} == told
