"""Series that a node exposes about its drafts."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pd.engine.draft_tree import DraftTree, make_chain
from pd.scheduling.metrics import SpeculationMetrics, VerifiedDrafts

LENGTH = "pd_speculative_acceptance_length"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> SpeculationMetrics:
    return SpeculationMetrics(registry)


def drafts(count: int, accepted: int) -> VerifiedDrafts:
    """Chains of four tokens, of each of which so many are accepted."""
    verified = VerifiedDrafts()
    for _ in range(count):
        verified.add_draft(make_chain(4), accepted)
    return verified


def test_tokens_are_counted_by_place_in_the_draft(
    registry: CollectorRegistry, metrics: SpeculationMetrics
) -> None:
    """Trees and drafts that adaptation has cut are counted, too."""
    tree = DraftTree(np.array([-1, -1, 0, 0, 1, 2], np.int32))
    verified = VerifiedDrafts()
    for shape, accepted in (
        (tree, 3),
        (tree, 0),
        (tree.take_first(3), 1),
        (make_chain(1), 1),
        (make_chain(4), 2),
    ):
        verified.add_draft(shape, accepted)
    metrics.observe_drafts(verified)
    found = {
        name: [
            registry.get_sample_value(f"pd_speculative_{name}_total", {"position": str(position)})
            for position in range(4)
        ]
        for name in ("drafted", "accepted")
    }
    assert found == {"drafted": [8, 8, 3, 1], "accepted": [4, 2, 1, None]}


def test_acceptance_length_counts_the_models_own_token(
    registry: CollectorRegistry, metrics: SpeculationMetrics
) -> None:
    assert registry.get_sample_value(LENGTH) == 0
    metrics.observe_drafts(drafts(1, 0))
    assert registry.get_sample_value(LENGTH) == 1
    metrics.observe_drafts(drafts(3, 4))
    assert registry.get_sample_value(LENGTH) == 1 + 12 / 4
    accepted = [
        registry.get_sample_value("pd_speculative_accepted_total", {"position": str(position)})
        for position in range(4)
    ]
    assert accepted == [3, 3, 3, 3]


def test_acceptance_length_follows_recent_drafts(
    registry: CollectorRegistry, metrics: SpeculationMetrics
) -> None:
    for _ in range(100):
        metrics.observe_drafts(drafts(1_000, 4))
    assert registry.get_sample_value(LENGTH) == 5
    for _ in range(100):
        metrics.observe_drafts(drafts(1_000, 0))
    length = registry.get_sample_value(LENGTH)
    assert length is not None
    assert 1 <= length < 1.001


def test_total_time_of_a_step_is_that_of_its_parts(
    registry: CollectorRegistry, metrics: SpeculationMetrics
) -> None:
    metrics.observe_step(0.25, 1.0)
    metrics.observe_step(0.5, 2.0)
    seconds = {
        part: registry.get_sample_value("pd_speculative_step_seconds_total", {"part": part})
        for part in ("draft", "verify", "total")
    }
    assert seconds == {"draft": 0.75, "verify": 3.0, "total": 3.75}
    assert registry.get_sample_value("pd_speculative_steps_total") == 2
