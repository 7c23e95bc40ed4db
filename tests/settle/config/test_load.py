"""Tables: files, overrides, layers, and where each value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hybridflow.core.errors import ConfigError
from hybridflow.settle.config.load import (
    Provenance,
    expand,
    flatten,
    load_toml,
    merge,
    nest,
    parse_override,
    read_config,
)

# --- files ---


def test_a_file_is_read_as_tables(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbfa = 1\r\n[b]\r\nc = 'd'\r\n")
    assert load_toml(tmp_path / "x.toml") == {"a": 1, "b": {"c": "d"}}


@pytest.mark.parametrize(
    "content, why",
    [
        (b"a = 1\nb = = 2\n", r"x\.toml, line 2, column 5: Invalid value; the line is: b = = 2"),
        (b"a = 1\na = 2\n", r"x\.toml, line 2, column 6: .*: a = 2"),
        (b"a = [1,", r"x\.toml: .*at end of document"),
        (b"a = 1\nb = '\xff'\n", r"x\.toml, line 2: not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path, content, why):
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        load_toml(tmp_path / "x.toml")


def test_a_file_that_is_not_there_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_toml(tmp_path)


# --- overrides ---


@pytest.mark.parametrize(
    "text, value",
    [
        ("k=vllm", "vllm"),
        ("k=2e-4", 2e-4),
        ("k=1e-4", 1e-4),
        ("k=1.e-4", 1e-4),
        ("k=.5", 0.5),
        ("k=-.5E3", -500.0),
        ("k=3", 3),
        ("k=1_000", 1000),
        ("k=007", "007"),
        ("k=/x/y", "/x/y"),
        ("k=[2]", [2]),
        ('k={name = "a", n = 1}', {"name": "a", "n": 1}),
        ("k=true", True),
        ("k=True", "True"),
        ("k=", ""),
        ("k=a=b", "a=b"),
        ('k="3"', "3"),
        ("k = 3", 3),
        ("k=2024-01-01", "2024-01-01"),
        ("k=10:30:00", "10:30:00"),
        ("k=[a, b]", "[a, b]"),
        ("k=1\nother = 2", "1\nother = 2"),
        ("k=run #3", "run #3"),
        ("k=.", "."),
        ("k=e4", "e4"),
    ],
)
def test_the_value_of_an_override_is_toml_then_a_float_then_a_string(text, value):
    key, got = parse_override(text)
    assert (key, got) == ("k", value) and type(got) is type(value)


@pytest.mark.parametrize(
    "text, why",
    [
        ("stop", "there is no '='; write key=value"),
        ("--a.b=1", r"write it without dashes, a\.b=1"),
        ("a..b=1", "is not a dotted key"),
        ("=1", "is not a dotted key"),
    ],
)
def test_an_override_of_another_form_is_refused_with_how_to_write_it(text, why):
    with pytest.raises(ConfigError, match=why):
        parse_override(text)


# --- layers ---

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines
KEYS = st.text("abcd_-", min_size=1, max_size=3)
LEAVES = st.one_of(
    st.integers(), st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
TABLES = st.recursive(
    LEAVES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=8
)
TREES = st.dictionaries(KEYS, TABLES, max_size=3)


@patient
@given(TREES)
def test_the_leaves_of_a_table_merged_one_by_one_are_the_table(tree):
    built: dict[str, Any] = {}
    for path, value in flatten(tree).items():
        built = merge(built, nest(path, value))
    assert built == tree


@patient
@given(TREES, TREES)
def test_a_merge_has_every_value_on_top_and_no_key_that_neither_had(base, over):
    merged, top = flatten(merge(base, over)), flatten(over)
    assert {path: merged[path] for path in top} == top
    assert all(path in top or merged[path] == flatten(base)[path] for path in merged)


@patient
@given(TREES)
def test_merging_with_nothing_or_with_itself_changes_nothing(tree):
    assert merge(tree, {}) == merge({}, tree) == merge(tree, tree) == tree


@patient
@given(TREES, TREES)
def test_the_source_of_every_merged_leaf_is_the_last_layer_that_has_it(base, over):
    sources = Provenance()
    sources.record(base, "file")
    sources.record(over, "command line")
    merged = flatten(merge(base, over))
    assert {path: sources.of(path) for path in merged} == {
        path: "command line" if path in flatten(over) else "file" for path in merged
    }
    assert sources.sources.keys() == merged.keys()


def test_a_merge_shares_nothing_with_its_layers():
    base = {"a": {"b": [1]}}
    merge(base, {})["a"]["b"].append(2)
    assert base == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    "base, over, expected",
    [
        ({}, {"rollout": "vllm"}, {"name": "vllm"}),
        ({"rollout": {"name": "inline", "x": 1}}, {"rollout": "vllm"}, {"name": "vllm", "x": 1}),
        ({"rollout": "inline"}, {"rollout": {"x": 1}}, {"name": "inline", "x": 1}),
        ({"rollout": "inline"}, {}, {"name": "inline"}),
        ({"rollout": {"x": {"name": "y"}}}, {"rollout": {"x": "z"}}, {"x": "z"}),
    ],
)
def test_a_string_stands_for_the_name_of_a_table_where_the_shorthand_says_so(base, over, expected):
    assert merge(expand(base), expand(over))["rollout"] == expected


def test_a_star_in_a_shorthand_is_any_one_key():
    tables = {"actor": {"backend": "fsdp"}, "backend": "x"}
    assert expand(tables) == {"actor": {"backend": {"name": "fsdp"}}, "backend": "x"}


def test_a_list_is_replaced_as_a_whole_and_so_is_its_source():
    sources = Provenance()
    sources.record({"rewards": [{"name": "a", "weight": 1}, {"name": "b"}], "n": [1]}, "file x")
    sources.record({"rewards": [{"name": "c"}]}, "command line")
    assert sources.of("rewards.0.name") == "command line"
    assert sources.of("rewards.0.weight") == sources.of("rewards.1.name") == "default"
    assert sources.of("n") == sources.of("n.0") == "file x"


def test_a_config_is_a_file_with_overrides_on_top_and_the_source_of_each_value(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('rollout = "inline"\n[actor]\nlr = 1\nsteps = 2\n')
    data, sources = read_config(file, ["actor.lr=2", "rollout.x=1", "actor.lr=3"])
    assert data == {"rollout": {"name": "inline", "x": 1}, "actor": {"lr": 3, "steps": 2}}
    assert sources.of("actor.lr") == sources.of("rollout.x") == "command line"
    assert sources.of("actor.steps") == sources.of("rollout.name") == f"file {file}"
    assert sources.of("actor.other") == sources.of("nothing") == "default"


def test_all_overrides_that_cannot_be_parsed_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        read_config(None, ["stop", "a=1", "--b=2"])
    assert len(caught.value.problems) == 2


@attrs.frozen
class Layer:
    width: int
    betas: tuple[float, float] = (0.9, 0.95)
    folder: Path | None = None


@attrs.frozen
class Net:
    layers: list[Layer]
    options: dict[str, Any] = attrs.field(factory=dict)
    _hidden: int = 1
    made: int = attrs.field(default=3, init=False)


def test_an_instance_flattens_to_the_leaves_of_its_fields():
    assert flatten(Net([Layer(4), Layer(5)])) == {
        "layers.0.width": 4,
        "layers.0.betas": (0.9, 0.95),
        "layers.0.folder": None,
        "layers.1.width": 5,
        "layers.1.betas": (0.9, 0.95),
        "layers.1.folder": None,
        "options": {},
        "hidden": 1,
    }
