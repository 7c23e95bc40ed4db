"""How an engine in a process of its own is watched."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.hosting.settings import ProcessConfig


@attrs.frozen
class Here(ProcessConfig):
    own_process: bool = False


@attrs.frozen
class Apart(ProcessConfig):
    """An engine that always has a process of its own, and so no setting for it."""

    @property
    def own_process(self) -> bool:
        return True


def test_restarts_are_for_an_engine_in_a_process_of_its_own():
    given = ModelSpec({}, None, 0), generation_layout(ParallelLayout(), 1, 1), "cpu"
    [problem] = Here(restarts=1).problems(*given)
    assert "rollout.restarts is for an engine in a process of its own" in problem
    assert "rollout.own_process = true" in problem
    for config in (Here(), Here(own_process=True, restarts=1), Apart(restarts=2)):
        assert config.problems(*given) == []


WRONG = [("restarts", -1), ("start_timeout_s", 0.0), ("hang_timeout_s", -2.0)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_makes_no_sense_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Here(**{name: value})
