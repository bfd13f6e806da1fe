"""Counters of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from pd.launch import NodeServer


def counter(server: NodeServer, name: str, **labels: str) -> float:
    """Sum all values of a metric with these labels."""
    text = server.node.core.metrics.render_text().decode()
    families = text_string_to_metric_families(text)
    samples = (s for family in families for s in family.samples if s.name == name)
    return sum(s.value for s in samples if labels.items() <= s.labels.items())
