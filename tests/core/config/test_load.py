"""Configuration: files, overrides, layers and their sources, and classes with every problem reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.core.config import (
    Provenance,
    at_least,
    field_docs,
    flatten,
    fraction,
    load_toml,
    merge,
    nearest,
    nest,
    non_negative,
    parse_override,
    positive,
    read_config,
    structure,
)
from hybridflow.core.errors import ConfigError


@attrs.frozen
class Optimizer:
    """An optimizer."""

    lr: float = attrs.field(default=1e-6, validator=positive)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = attrs.field(default=1.0, validator=non_negative)
    """Largest norm of the gradient;
    none: not clipped."""
    steps: int = attrs.field(default=10, validator=at_least(1))


@attrs.frozen
class Role:
    model: str
    """Folder of the model."""
    kind: Literal["policy", "value"] = "policy"
    optimizer: Optimizer = Optimizer()
    frozen: bool = False
    devices: tuple[int, ...] = ()
    options: dict[str, Any] = attrs.field(factory=dict)
    stop: int | Literal["auto"] | None = None
    folder: Path | None = None


@attrs.frozen
class Part:
    name: str
    weight: float = 1.0


@attrs.frozen
class Run:
    actor: Role
    roles: dict[str, Role] = attrs.field(factory=dict)
    rewards: list[Part] = attrs.field(factory=list)
    share: float = attrs.field(default=1.0, validator=fraction)

    def __attrs_post_init__(self):
        if self.actor.kind == "value":
            raise ValueError('the actor is a policy; give actor.kind = "policy"')


MINIMAL = {"actor": {"model": "m"}}


def problems_of(data: Any, cls: type = Run, path: str = "") -> list[str]:
    problems: list[str] = []
    made = structure(data, cls, path, problems)
    assert (made is None) == bool(problems)
    return problems


# --- files ---


def test_a_file_is_read_as_tables(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbfa = 1\r\n[b]\r\nc = 'd'\r\n")
    assert load_toml(tmp_path / "x.toml") == {"a": 1, "b": {"c": "d"}}


@pytest.mark.parametrize(
    "content, why",
    [
        (b"a = 1\nb = = 2\n", r"x\.toml, line 2, column 5: Invalid value; the line is: b = = 2"),
        (b"a = 1\na = 2\n", r"x\.toml, line 2, column 6: Cannot overwrite a value; the line is: a = 2"),
        (b"a = [1,", r"x\.toml: .*at end of document"),
        (b"a = 1\nb = '\xff'\n", r"x\.toml, line 2: not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path, content, why):
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        load_toml(tmp_path / "x.toml")


def test_a_file_that_is_not_there_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
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
LEAVES = st.one_of(st.integers(), st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
TABLES = st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=8)
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
    assert merge(base, over, frozenset({"rollout"}))["rollout"] == expected


def test_a_star_in_a_shorthand_is_any_one_key():
    merged = merge({"actor": {"backend": "fsdp"}, "backend": "x"}, {}, frozenset({"*.backend"}))
    assert merged == {"actor": {"backend": {"name": "fsdp"}}, "backend": "x"}


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
    data, sources = read_config(file, ["actor.lr=2", "rollout.x=1", "actor.lr=3"], frozenset({"rollout"}))
    assert data == {"rollout": {"name": "inline", "x": 1}, "actor": {"lr": 3, "steps": 2}}
    assert sources.of("actor.lr") == sources.of("rollout.x") == "command line"
    assert sources.of("actor.steps") == sources.of("rollout.name") == f"file {file}"
    assert sources.of("actor.other") == sources.of("nothing") == "default"


def test_all_overrides_that_cannot_be_parsed_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        read_config(None, ["stop", "a=1", "--b=2"])
    assert len(caught.value.problems) == 2


def test_an_instance_flattens_to_the_leaves_of_its_fields():
    run = structure({**MINIMAL, "rewards": [{"name": "a"}]}, Run)
    flat = flatten(run)
    assert flat["actor.optimizer.betas"] == (0.9, 0.95) and flat["rewards.0.weight"] == 1.0
    assert flat["actor.options"] == {} and flat["actor.stop"] is None and flat["roles"] == {}


# --- classes ---


def test_tables_become_frozen_classes_with_their_defaults():
    data = {
        "actor": {"model": "m", "devices": [0, 1], "optimizer": {"lr": 1}, "options": {"a": [1, "b"]}, "folder": "/x"},
        "roles": {"ref": {"model": "r", "stop": "auto"}, "critic": {"model": "c", "stop": 3, "kind": "value"}},
        "rewards": [{"name": "a", "weight": 2}],
    }
    run = structure(data, Run)
    assert run.actor.devices == (0, 1) and run.actor.options == {"a": [1, "b"]} and run.actor.folder == Path("/x")
    assert run.actor.optimizer.lr == 1.0 and type(run.actor.optimizer.lr) is float
    assert (run.roles["ref"].stop, run.roles["critic"].stop) == ("auto", 3)
    assert run.rewards == [Part("a", 2.0)] and run.share == 1.0


def test_a_flattened_instance_structures_to_itself():
    run = structure({**MINIMAL, "roles": {"ref": {"model": "r", "devices": [1]}}}, Run)
    data: dict[str, Any] = {}
    for path, value in flatten(run).items():
        data = merge(data, nest(path, value))
    assert structure(data, Run) == run


@pytest.mark.parametrize(
    "field, value, why",
    [
        ("optimizer.lr", "fast", "expected a number, got 'fast' (string)"),
        ("optimizer.lr", True, "expected a number, got true (boolean)"),
        ("optimizer.steps", "3", "expected an integer, got '3' (string)"),
        ("optimizer.steps", 3.5, "expected an integer, got 3.5 (number)"),
        ("optimizer.steps", True, "expected an integer, got true (boolean)"),
        ("optimizer.clip", "x", "expected a number, got 'x' (string)"),
        ("optimizer.betas", [0.9], "expected a list of 2, got 1 values: [0.9] (list)"),
        ("optimizer", 3, "expected a table, got 3 (integer)"),
        ("frozen", "True", "expected true or false, got 'True' (string)"),
        ("frozen", 1, "expected true or false, got 1 (integer)"),
        ("model", 3, "expected a string, got 3 (integer)"),
        ("kind", "score", 'expected one of "policy", "value", got \'score\' (string)'),
        ("devices", "01", "expected a list, got '01' (string)"),
        ("devices", {"a": 1}, "expected a list, got {'a': 1} (table)"),
        ("options", [1], "expected a table, got [1] (list)"),
        ("stop", "never", "expected an integer or one of \"auto\", got 'never' (string)"),
        ("stop", True, 'expected an integer or one of "auto", got true (boolean)'),
        ("folder", 3, "expected a string (a path), got 3 (integer)"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_was_expected_and_got(field, value, why):
    data = merge(MINIMAL, nest(f"actor.{field}", value))
    [problem] = problems_of(data)
    assert problem.startswith(f"actor.{field}: ") and why.split(" (a path)")[0] in problem


def test_a_wrong_element_of_a_list_is_named_by_its_place():
    data = {"actor": {"model": "m", "devices": [0, "one", 2.5]}, "rewards": [{"name": "a"}, {"weigth": 1}]}
    assert problems_of(data) == [
        "actor.devices.1: expected an integer, got 'one' (string)",
        "actor.devices.2: expected an integer, got 2.5 (number)",
        "rewards.1.weigth: unknown key; did you mean `weight`? (known: name, weight)",
        "rewards.1.name: required, but missing; expected a string",
    ]


def test_every_problem_is_reported_at_once_with_its_key():
    data = {
        "actor": {"optimzer": {}, "optimizer": {"lr": -1, "steps": "3", "clip": -2.0}},
        "roles": {"ref": {"model": 1}},
        "share": 0,
        "zzz": 1,
    }
    assert problems_of(data) == [
        "zzz: unknown key (known: actor, roles, rewards, share)",
        "actor.optimzer: unknown key; did you mean `optimizer`? "
        "(known: model, kind, optimizer, frozen, devices, options, stop, folder)",
        "actor.model: required, but missing; expected a string (Folder of the model.)",
        "actor.optimizer.steps: expected an integer, got '3' (string)",
        "actor.optimizer.lr: must be above 0, got -1.0; give a number above 0",
        "actor.optimizer.clip: must be 0 or more, got -2.0; give 0 to turn it off, or a positive number",
        "roles.ref.model: expected a string, got 1 (integer)",
        "share: must be above 0 and at most 1, got 0.0; give a fraction, 1 for all",
    ]


def test_the_path_at_which_a_table_stands_begins_every_problem():
    assert problems_of({"lr": "x"}, Optimizer, "actor.optimizer")[0].startswith("actor.optimizer.lr: expected a number")
    assert problems_of([], Optimizer, "actor.optimizer") == ["actor.optimizer: expected a table, got [] (list)"]


def test_problems_are_added_to_those_that_were_there():
    problems = ["before"]
    assert structure({"lr": "x"}, Optimizer, "o", problems) is None and len(problems) == 2


def test_without_a_list_of_problems_they_are_raised_together():
    with pytest.raises(ConfigError) as caught:
        structure({"lr": "x", "steps": 0}, Optimizer)
    assert len(caught.value.problems) == 2


def test_what_the_class_itself_refuses_is_named_by_the_key_of_its_table():
    data = {"actor": {"model": "m", "kind": "value"}}
    assert problems_of(data, Run, "run") == ['run: the actor is a policy; give actor.kind = "policy"']
    assert problems_of(data) == ['the actor is a policy; give actor.kind = "policy"']


def test_a_validator_that_asks_the_instance_and_a_field_with_a_converter_are_checked_by_the_class():
    @attrs.frozen
    class Pair:
        low: int = 0
        high: int = attrs.field(default=1)
        names: list[str] = attrs.field(factory=list, converter=tuple, validator=attrs.validators.max_len(1))

        @high.validator
        def _above(self, attribute, value):
            if value < self.low:
                raise ValueError("high: must be at least low")

    assert structure({"names": ["a"]}, Pair).names == ("a",)
    assert problems_of({"low": 2}, Pair, "pair") == ["pair: high: must be at least low"]
    assert "Length of 'names' must be <= 1: 2" in problems_of({"names": ["a", "b"]}, Pair)[0]


def test_an_attrs_validator_is_reported_in_its_own_words():
    @attrs.frozen
    class Sized:
        size: int = attrs.field(default=1, validator=attrs.validators.in_([1, 2]))

    assert problems_of({"size": 3}, Sized, "x") == ["x.size: 'size' must be in [1, 2] (got 3)"]


def test_the_problems_inside_a_table_that_may_be_nothing_are_named_inside_it():
    @attrs.frozen
    class Maybe:
        part: Part | str | None = None
        parts: list[Part] | int = 0

    assert structure({"part": {"name": "a"}}, Maybe).part == Part("a")
    assert structure({"part": None}, Maybe).part is None
    assert problems_of({"part": {"name": 3}}, Maybe) == ["part.name: expected a string, got 3 (integer)"]
    assert problems_of({"parts": [{"name": 3}]}, Maybe) == ["parts.0.name: expected a string, got 3 (integer)"]
    assert problems_of({"part": 3}, Maybe) == ["part: expected a table or a string, got 3 (integer)"]


def test_a_type_without_a_hook_is_a_problem_and_not_a_crash():
    @attrs.frozen
    class Odd:
        number: complex = 0j

    assert problems_of({"number": "x"}, Odd)[0].startswith("number: expected complex, got 'x' (string)")


def test_a_long_value_is_cut_in_the_message():
    assert len(problems_of({"lr": "x" * 1000}, Optimizer)[0]) < 150


# --- documentation, names, validators ---


def test_the_docstring_under_a_field_is_its_documentation():
    assert dict(field_docs(Optimizer)) == {
        "lr": "Peak learning rate.",
        "clip": "Largest norm of the gradient;\nnone: not clipped.",
    }


def test_a_subclass_inherits_and_replaces_the_documentation_of_fields():
    @attrs.frozen
    class Special(Optimizer):
        lr: float = 1.0
        """Another rate."""

    assert field_docs(Special)["lr"] == "Another rate." and "clip" in field_docs(Special)


def test_a_class_without_source_has_no_documentation():
    assert dict(field_docs(attrs.make_class("Made", {"x": attrs.field(default=1)}))) == {}


def test_the_nearest_name_ignores_case_and_far_ones_are_not_near():
    assert nearest("LR", ["lr", "steps"]) == "lr" and nearest("optimzer", ["optimizer"]) == "optimizer"
    assert nearest("zzz", ["lr"]) is None and nearest("x", []) is None


@pytest.mark.parametrize(
    "validator, good, bad",
    [
        (positive, [1, 1e-9, None], [0, -1, float("nan")]),
        (non_negative, [0, 1, None], [-1, float("nan")]),
        (fraction, [1e-9, 1, None], [0, 1.01, float("nan")]),
        (at_least(2), [2, 3, None], [1, float("nan")]),
    ],
)
def test_a_validator_names_the_field_what_it_must_be_what_was_got_and_what_to_do(validator, good, bad):
    cls = attrs.make_class("Made", {"size": attrs.field(validator=validator)}, frozen=True)
    for value in good:
        assert cls(value).size is value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^size: must be .*, got {value}; give "):
            cls(value)
