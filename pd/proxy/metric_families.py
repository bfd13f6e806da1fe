"""Metrics of several processes as one: families that can be sent, added up and written down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry

# The smallest value of all processes counts for these: when the first of them began to count, and
# whether all of them can use a node.
_SMALLEST = ("_created", "_up")


class Sample(msgspec.Struct, array_like=True):
    """One value, by its name and labels."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """One metric with all its samples, as Prometheus' client library has it."""

    name: str
    documentation: str
    type: str
    samples: list[Sample]


_FAMILIES = msgspec.msgpack.Decoder(list[Family])


def families_from(value: object) -> list[Family]:
    """Families that came from another process as plain lists. Raises msgspec.ValidationError."""
    return _FAMILIES.decode(msgspec.msgpack.encode(value))


def families_of(registry: CollectorRegistry) -> list[Family]:
    """The metrics of a registry."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merge(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """The metrics of all processes together. What each counted is added up."""
    families: dict[str, Family] = {}
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for part in parts:
        for family in part:
            merged = families.setdefault(
                family.name, Family(family.name, family.documentation, family.type, [])
            )
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                known = found.get(key)
                if known is None:
                    found[key] = copy = Sample(sample.name, sample.labels, sample.value)
                    merged.samples.append(copy)
                elif sample.name.endswith(_SMALLEST):
                    known.value = min(known.value, sample.value)
                else:
                    known.value += sample.value
    return list(families.values())


def counted(families: Sequence[Family]) -> list[Family]:
    """The metrics that remain true of a process that has ended: all but the state that it had."""
    return [family for family in families if family.type != "gauge"]


class _Collected:
    """A registry of metrics that were collected already."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def render(families: Sequence[Family]) -> bytes:
    """The exposition, the same that the library makes of the registry."""
    return generate_latest(_Collected(families))
