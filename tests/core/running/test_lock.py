"""A folder's lock: held by one process, seen by others, gone with its holder."""

from __future__ import annotations

import pytest

from hybridflow.core.errors import ConfigError
from hybridflow.core.running.lock import hold, is_held


def test_a_folder_is_held_while_the_body_runs(tmp_path):
    folder = tmp_path / "new"
    assert not is_held(folder)
    with hold(folder):
        assert is_held(folder)
        with pytest.raises(ConfigError, match="another process runs in"), hold(folder):
            raise AssertionError("held twice")
    assert not is_held(folder)
    with pytest.raises(KeyError), hold(folder):
        raise KeyError
    assert not is_held(folder)
