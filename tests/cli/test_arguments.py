"""The config and its overrides, as several commands take them."""

from __future__ import annotations

import argparse

import pytest

from hybridflow.cli.arguments import add_config


def parser(**options) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="hybridflow")
    add_config(made, **options)
    return made


def test_the_first_argument_is_the_config_and_the_rest_overrides_it():
    found = parser().parse_args(["one.toml", "run.steps=3", "actor.layout.tp=2"])
    assert vars(found) == {"config": "one.toml", "overrides": ["run.steps=3", "actor.layout.tp=2"]}
    assert parser().parse_args(["one.toml"]).overrides == []


def test_a_config_that_is_not_required_may_be_left_out(capsys):
    assert parser(required=False).parse_args([]).config is None
    with pytest.raises(SystemExit):
        parser().parse_args([])
    assert "the following arguments are required: config" in capsys.readouterr().err


def test_the_example_is_in_the_help():
    assert "for example run.steps=9" in parser(example="run.steps=9").format_help()
