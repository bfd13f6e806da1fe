"""Combines the metrics of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry

# For these we take the smallest value of all processes: when the first one began to count, and
# whether all of them can use a node.
_SMALLEST = ("_created", "_up")


class Sample(msgspec.Struct, array_like=True):
    """One value with its name and labels."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """One metric with all samples, as in Prometheus' client library."""

    name: str
    documentation: str
    type: str
    samples: list[Sample]


_FAMILIES = msgspec.msgpack.Decoder(list[Family])


def decode_families(value: object) -> list[Family]:
    """Decode families from another process. Raises msgspec.ValidationError."""
    return _FAMILIES.decode(msgspec.msgpack.encode(value))


def collect_registry(registry: CollectorRegistry) -> list[Family]:
    """Return the metrics of a registry."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merge_families(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """Combine the metrics of all processes by adding up their counts."""
    families: dict[str, Family] = {}
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for part in parts:
        for family in part:
            merged = families.setdefault(
                family.name, Family(family.name, family.documentation, family.type, [])
            )
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                known = samples.get(key)
                if known is None:
                    samples[key] = copy = Sample(sample.name, sample.labels, sample.value)
                    merged.samples.append(copy)
                elif sample.name.endswith(_SMALLEST):
                    known.value = min(known.value, sample.value)
                else:
                    known.value += sample.value
    return list(families.values())


def drop_gauges(families: Sequence[Family]) -> list[Family]:
    """Return the metrics that stay true after their process has ended."""
    return [family for family in families if family.type != "gauge"]


class _Collected:
    """A registry of previously collected metrics."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def render_families(families: Sequence[Family]) -> bytes:
    """Render the exposition, in the same form as the library."""
    return generate_latest(_Collected(families))
