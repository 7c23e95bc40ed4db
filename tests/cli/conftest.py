"""What tests of the commands share.

path    sys.path as it is, put back at the end.
config  the file of a PPO config that plans well.
tiny    the current folder, with the smallest config that runs, tiny.toml, and its rewards.
shown   the current folder, with the configs of helpers/shown.py.
broken  in the place of our registry one with a plugin that lacks something, one that does not load,
        and two of one name.
"""

from __future__ import annotations

import sys

import pytest
from helpers.configs import ppo_config
from helpers.shown import write_shown
from helpers.tiny import write

from hybridflow.cli import doctor, plugins
from hybridflow.core.plugins import Descriptor, Registry


@pytest.fixture
def path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return sys.path


@pytest.fixture
def tiny(tmp_path, monkeypatch, path):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    path.insert(0, str(tmp_path))  # of its rewards
    sys.modules.pop("rewards", None)
    yield tmp_path
    sys.modules.pop("rewards", None)


@pytest.fixture
def config(tmp_path):
    return ppo_config(tmp_path)


@pytest.fixture
def shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shown(tmp_path)
    return tmp_path


@pytest.fixture
def broken(monkeypatch):
    found = Registry()
    lacking = Descriptor(
        "reward", "lacking", "a:B", requires=("no_such_module",), remedy="pip install it"
    )
    found.add(lacking, "acme", "1.0")
    found.add(Descriptor("reward", "raising", "no_such_module:B"), "acme", "1.0")
    found.add(Descriptor("reward", "double", "a:B"), "acme", "1.0")
    found.add(Descriptor("reward", "double", "c:D"), "other", "2.0")
    monkeypatch.setattr(doctor, "registry", lambda: found)
    monkeypatch.setattr(plugins, "registry", lambda: found)
    return found
