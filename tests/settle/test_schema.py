"""The names of a file's tables, and [sampling], whose validators say what to do."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import ConfigError
from hybridflow.settle.config.field_docs import field_docs
from hybridflow.settle.config.structure import structure
from hybridflow.settle.schema import SamplingSection


def test_every_setting_of_sampling_is_explained_and_has_a_default():
    assert field_docs(SamplingSection).keys() == {f.name for f in attrs.fields(SamplingSection)}
    assert structure({}, SamplingSection) == SamplingSection()


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("max_tokens", 0, "must be at least 1"),
        ("temperature", -0.5, "must be 0 or more"),
        ("top_p", 0.0, "must be above 0 and at most 1"),
        ("top_k", -1, "must be 0 or more"),
        ("min_p", 1.5, "got 1.5; give 0 to turn it off"),
        ("min_p", -0.1, "must be from 0 to 1"),
        ("logit_bias", {"the": 1.0}, "got 'the'; write a whole number"),
        ("logit_bias", {"07": 1.0}, "keys are token ids, got '07'"),
        ("logit_bias", {"-1": 1.0}, "keys are token ids, got '-1'"),
        ("logit_bias", {"7": float("nan")}, "token 7 has the bias nan"),
        ("logit_bias", [17], "expected a table"),
    ],
)
def test_a_value_that_cannot_be_says_what_was_got_and_what_to_give(field, value, said):
    with pytest.raises(ConfigError) as error:
        structure({field: value}, SamplingSection, "sampling")
    [problem] = error.value.problems
    assert problem.startswith(f"sampling.{field}: ") and said in problem, problem


def test_a_sampling_section_is_the_parameters_of_requests():
    table = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_tokens": [3],
             "logit_bias": {"17": -100, "2": 1.5}}  # fmt: skip
    section = structure(table, SamplingSection)
    params = section.params()
    assert params == SamplingParams(7, 0.5, 0.9, 5, 0.1, {2: 1.5, 17: -100.0}, (3,))
    assert params.logit_bias == ((2, 1.5), (17, -100.0)) and hash(params) == hash(section.params())
    assert {f.name for f in attrs.fields(SamplingSection)} == set(table)
