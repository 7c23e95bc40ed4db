"""What plugins say that they can do."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.capabilities import (
    BY_KIND,
    EngineCapabilities,
    NoCapabilities,
    TrainingCapabilities,
    capabilities_class,
)


def test_sets_of_names_are_made_of_whatever_lists_them():
    given = TrainingCapabilities(axes=["dp", "tp", "dp"], extras=(name for name in ("positions",)))
    assert given.axes == frozenset({"dp", "tp"})
    assert given.extras == frozenset({"positions"})
    assert given == TrainingCapabilities(axes={"tp", "dp"}, extras=["positions"])
    assert given.models == frozenset({"policy", "value", "score"})


def test_a_text_is_no_set_of_names():
    with pytest.raises(TypeError, match=r"write \{'cuda'\}"):
        EngineCapabilities(devices="cuda")


def test_each_kind_has_its_class_and_others_have_nothing_to_say():
    assert capabilities_class("training_backend") is TrainingCapabilities
    assert capabilities_class("rollout_engine") is EngineCapabilities
    assert {capabilities_class(kind) for kind in ("reward", "tracker")} == {NoCapabilities}
    assert NoCapabilities not in BY_KIND.values()
