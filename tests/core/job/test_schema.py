"""The sections of a file: defaults that work, every field explained, validators that say what to do."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.config.field_docs import field_docs
from hybridflow.core.config.structure import structure
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import ConfigError
from hybridflow.core.job import schema

SECTIONS = [
    schema.RunSection,
    schema.LayoutSection,
    schema.RewardPart,
    schema.RoleSection,
    schema.SamplingSection,
    schema.ValidationSection,
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_says_what_it_means(section):
    docs = field_docs(section)
    explained_by_its_doc = {"steps", "samples"}
    for field in attrs.fields(section):
        assert docs.get(field.name), f"{section.__name__}.{field.name} has no docstring"
        assert len(docs[field.name]) > 10 or field.name in explained_by_its_doc


@pytest.mark.parametrize("section", [s for s in SECTIONS if s is not schema.RewardPart])
def test_every_section_has_defaults(section):
    assert structure({}, section) == section()


@pytest.mark.parametrize(
    "section, field, value, said",
    [
        (schema.RunSection, "steps", 0, "must be at least 1, got 0; give 1 or more"),
        (schema.RunSection, "seed", -1, "must be 0 or more, got -1"),
        (schema.RunSection, "device", "tpu", 'expected one of "auto", "cpu", "cuda", got'),
        (schema.RunSection, "checkpoint_every", -1, "must be 0 or more"),
        (schema.RunSection, "keep_checkpoints", 0, "must be at least 1"),
        (schema.RunSection, "restarts", -1, "must be 0 or more"),
        (schema.RunSection, "max_staleness", -1, "must be 0 or more"),
        (schema.LayoutSection, "dp", 0, "must be at least 1"),
        (schema.LayoutSection, "tp", 0, "must be at least 1"),
        (schema.RoleSection, "micro_batch_tokens", 0, "must be at least 1"),
        (schema.SamplingSection, "max_tokens", 0, "must be at least 1"),
        (schema.SamplingSection, "temperature", -0.5, "must be 0 or more"),
        (schema.SamplingSection, "top_p", 0.0, "must be above 0 and at most 1"),
        (schema.SamplingSection, "top_k", -1, "must be 0 or more"),
        (
            schema.SamplingSection,
            "min_p",
            1.5,
            "must be from 0 to 1, got 1.5; give 0 to turn it off",
        ),
        (schema.SamplingSection, "min_p", -0.1, "must be from 0 to 1"),
        (
            schema.SamplingSection,
            "logit_bias",
            {"the": 1.0},
            "keys are token ids, got 'the'; write a whole number",
        ),
        (schema.SamplingSection, "logit_bias", {"07": 1.0}, "keys are token ids, got '07'"),
        (schema.SamplingSection, "logit_bias", {"-1": 1.0}, "keys are token ids, got '-1'"),
        (
            schema.SamplingSection,
            "logit_bias",
            {"7": float("nan")},
            "token 7 has the bias nan; give a number from -1e",
        ),
        (schema.SamplingSection, "logit_bias", [17], "expected a table"),
        (schema.ValidationSection, "every", -1, "must be 0 or more"),
        (schema.ValidationSection, "batch_rows", 0, "must be above 0"),
    ],
)
def test_a_value_that_cannot_be_says_what_was_got_and_what_to_give(section, field, value, said):
    with pytest.raises(ConfigError) as error:
        structure({field: value}, section, "here")
    [problem] = error.value.problems
    assert problem.startswith(f"here.{field}: ") and said in problem, problem


def test_shorthand_and_sections_agree():
    assert {"algorithm", "runtime", "rollout"} <= schema.SHORTHAND & set(schema.SECTIONS)
    assert not set(schema.USUAL_ROLES) & set(schema.SECTIONS)


def test_a_sampling_section_is_the_parameters_of_requests():
    table = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_tokens": [3],
             "logit_bias": {"17": -100, "2": 1.5}}  # fmt: skip
    section = structure(table, schema.SamplingSection)
    params = section.params()
    assert params == SamplingParams(7, 0.5, 0.9, 5, 0.1, {2: 1.5, 17: -100.0}, (3,))
    assert params.logit_bias == ((2, 1.5), (17, -100.0)) and hash(params) == hash(section.params())
    assert {f.name for f in attrs.fields(schema.SamplingSection)} == set(table)
