"""What a plugin says of itself: refused when it cannot be so; what brings what it lacks."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.capabilities import EngineCapabilities, RuntimeCapabilities
from hybridflow.core.errors import PluginError
from hybridflow.core.plugins.descriptor import (
    API_VERSION,
    Descriptor,
    check_api,
    check_descriptor,
)

FINE = {"kind": "reward", "name": "x", "factory": "json:loads"}


@pytest.mark.parametrize(
    "change, why",
    [
        ({"kind": "x"}, "unknown kind 'x'"),
        ({"kind": "rewrad"}, r"unknown kind 'rewrad'; did you mean 'reward'\? \(kinds: "),
        ({"factory": "json"}, "factory is 'package.module:Object', got 'json'"),
        ({"config": "json.Class"}, "config is 'package.module:Class', got 'json.Class'"),
        ({"name": "a:b"}, "a name is text without a colon, got 'a:b'"),
        ({"name": ""}, "a name is text without a colon, got ''"),
        ({"api": 2}, "plugin API 2, this hybridflow has 1: install a version of acme"),
        ({"capabilities": EngineCapabilities()}, "of a reward are a NoCapabilities, got Eng"),
    ],
)
def test_a_descriptor_that_cannot_work_is_refused(change, why):
    with pytest.raises(PluginError, match=why):
        check_descriptor(Descriptor(**FINE | change), "acme")


@pytest.mark.parametrize(
    "change",
    [{}, {"config": "json:Class"}, {"kind": "runtime", "capabilities": RuntimeCapabilities()}],
    ids=["plain", "with a config", "with capabilities"],
)
def test_a_descriptor_is_taken_though_nothing_of_it_is_there(change):
    check_descriptor(Descriptor(**FINE | {"factory": "no_such_module:Thing"} | change), "acme")


def test_what_is_missing_is_what_cannot_be_imported():
    made = Descriptor(**FINE, requires=("json", "no_such_module", "json.decoder", "json.nothing"))
    assert made.missing() == ["no_such_module", "json.nothing"]
    assert Descriptor(**FINE, requires="no_such_module").missing() == ["no_such_module"]
    assert Descriptor(**FINE).missing() == []


@pytest.mark.parametrize(
    "how, said",
    [
        ({}, "install no_such_module"),
        ({"extra": "vllm"}, "pip install 'hybridflow[vllm]'"),
        ({"extra": "vllm", "remedy": "build it from source"}, "build it from source"),
    ],
)
def test_how_to_install_it_is_its_own_remedy_or_the_extra_or_what_is_missing(how, said):
    assert Descriptor(**FINE, requires="no_such_module", **how).how_to_install() == said


def test_the_api_is_ours_or_not_said():
    check_api(API_VERSION, "acme")
    check_api(None, "acme")
    with pytest.raises(PluginError, match="made for API 1, or an older hybridflow"):
        check_api(API_VERSION - 1, "acme")
    with pytest.raises(PluginError, match="made for API 1, or a newer hybridflow"):
        check_api(API_VERSION + 1, "acme")
    for no_number in (True, "1", 1.0):
        with pytest.raises(PluginError, match="must be an integer"):
            check_api(no_number, "acme")
