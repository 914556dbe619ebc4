"""The metrics that are documented, drawn and watched are those that the service tells."""

from __future__ import annotations

import re

import pytest
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
