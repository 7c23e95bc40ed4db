"""Classes from tables: strict types, and every problem reported at once with its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from hybridflow.core.errors import ConfigError
from hybridflow.core.validators import at_least, fraction, non_negative, positive
from hybridflow.settle.config.load import flatten, merge, nest
from hybridflow.settle.config.structure import Problem, describe, structure


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
    problems: list[Problem] = []
    made = structure(data, cls, path, problems)
    assert (made is None) == bool(problems)
    return [str(problem) for problem in problems]


def test_tables_become_frozen_classes_with_their_defaults():
    data = {
        "actor": {
            "model": "m",
            "devices": [0, 1],
            "optimizer": {"lr": 1},
            "options": {"a": [1, "b"]},
            "folder": "/x",
        },
        "roles": {
            "ref": {"model": "r", "stop": "auto"},
            "critic": {"model": "c", "stop": 3, "kind": "value"},
        },
        "rewards": [{"name": "a", "weight": 2}],
    }
    run = structure(data, Run)
    assert (
        run.actor.devices == (0, 1)
        and run.actor.options == {"a": [1, "b"]}
        and run.actor.folder == Path("/x")
    )
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
    data = {
        "actor": {"model": "m", "devices": [0, "one", 2.5]},
        "rewards": [{"name": "a"}, {"weigth": 1}],
    }
    word, number, key, missing = problems_of(data)
    assert word.startswith("actor.devices.1: ") and "got 'one' (string)" in word
    assert number.startswith("actor.devices.2: ") and "got 2.5 (number)" in number
    assert key.startswith("rewards.1.weigth: ") and "did you mean `weight`?" in key
    assert missing.startswith("rewards.1.name: required")


def test_every_problem_is_reported_at_once_with_its_key():
    data = {
        "actor": {"optimzer": {}, "optimizer": {"lr": -1, "steps": "3", "clip": -2.0}},
        "roles": {"ref": {"model": 1}},
        "share": 0,
        "zzz": 1,
    }
    expected = {
        "zzz": "(known: actor, roles, rewards, share)",
        "actor.optimzer": "did you mean `optimizer`? (known: model, kind, optimizer, ",
        "actor.model": "required, but missing; expected a string (Folder of the model.)",
        "actor.optimizer.steps": "got '3' (string)",
        "actor.optimizer.lr": "got -1.0; give a number above 0",
        "actor.optimizer.clip": "got -2.0; give 0 to turn it off",
        "roles.ref.model": "got 1 (integer)",
        "share": "got 0.0; give a fraction",
    }
    for problem, (key, said) in zip(problems_of(data), expected.items(), strict=True):
        assert problem.startswith(f"{key}: ") and said in problem


def test_the_path_at_which_a_table_stands_begins_every_problem():
    [problem] = problems_of({"lr": "x"}, Optimizer, "actor.optimizer")
    assert problem.startswith("actor.optimizer.lr: ")
    [problem] = problems_of([], Optimizer, "actor.optimizer")
    assert problem.startswith("actor.optimizer: ")


def test_a_problem_is_a_sentence_that_begins_with_its_key():
    inner = Problem("lr", "too large")
    assert str(inner.inside("actor.optimizer")) == "actor.optimizer.lr: too large"
    assert str(Problem("", "none").inside("pools")) == "pools: none"
    assert str(inner.inside("")) == "lr: too large" and str(Problem("", "none")) == "none"


def test_problems_are_added_to_those_that_were_there():
    problems = [Problem("before", "there")]
    assert structure({"lr": "x"}, Optimizer, "o", problems) is None and len(problems) == 2


def test_without_a_list_of_problems_they_are_raised_together():
    with pytest.raises(ConfigError) as caught:
        structure({"lr": "x", "steps": 0}, Optimizer)
    assert len(caught.value.problems) == 2


def test_what_the_class_itself_refuses_is_named_by_the_key_of_its_table():
    data = {"actor": {"model": "m", "kind": "value"}}
    said = 'the actor is a policy; give actor.kind = "policy"'
    assert (problems_of(data, Run, "run"), problems_of(data)) == ([f"run: {said}"], [said])


def test_a_validator_that_asks_the_instance_and_a_field_with_a_converter_are_checked_by_the_class():
    @attrs.frozen
    class Pair:
        low: int = 0
        high: int = attrs.field(default=1)
        names: list[str] = attrs.field(
            factory=list, converter=tuple, validator=attrs.validators.max_len(1)
        )

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
    for data, key in (
        ({"part": {"name": 3}}, "part.name: expected a string,"),
        ({"parts": [{"name": 3}]}, "parts.0.name: expected a string,"),
        ({"part": 3}, "part: expected a table or a string,"),
    ):
        assert problems_of(data, Maybe) == [f"{key} got 3 (integer)"]


def test_a_type_without_a_hook_is_a_problem_and_not_a_crash():
    @attrs.frozen
    class Odd:
        number: complex = 0j

    assert problems_of({"number": "x"}, Odd)[0].startswith("number: expected complex")


def test_a_long_value_is_cut_in_the_message():
    assert len(problems_of({"lr": "x" * 1000}, Optimizer)[0]) < 150


def test_sets_sequences_and_choices_are_made_as_the_field_says():
    @attrs.frozen
    class Kinds:
        names: frozenset[str] = frozenset()
        sizes: Sequence[float] = ()
        bits: Literal[0, 1, "all"] = "all"
        parts: Mapping[str, Part] = attrs.field(factory=dict)

    made = structure(
        {"names": ["b", "a", "b"], "sizes": [1, 2.5], "bits": 1, "parts": {"x": {"name": "y"}}},
        Kinds,
    )
    assert made == Kinds(frozenset({"a", "b"}), (1.0, 2.5), 1, {"x": Part("y")})
    bits, name = problems_of({"bits": True, "parts": {"x": {}}}, Kinds)
    assert bits.startswith("bits: ") and name.startswith("parts.x.name: required")


def test_what_is_an_instance_already_stays_as_it_is():
    part = Part("a")
    assert structure({"actor": {"model": "m"}, "rewards": [part]}, Run).rewards[0] is part


@pytest.mark.parametrize(
    "type_, words",
    [
        (int, "an integer"),
        (float | None, "a number"),
        (Literal["a", 2], 'one of "a", 2'),
        (tuple[int, ...] | str, "a list or a string"),
        (dict[str, int], "a table"),
        (Part, "a table"),
        (Path, "a string (a path)"),
        (complex, "complex"),
    ],
)
def test_a_type_is_described_in_words(type_, words):
    assert describe(type_) == words
