"""The sections of a file: defaults that work, every field explained, validators that say what to do."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.config import field_docs, structure
from hybridflow.core.errors import ConfigError
from hybridflow.core.job import schema

SECTIONS = [
    schema.RunSection,
    schema.LayoutSection,
    schema.RewardPartSection,
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


@pytest.mark.parametrize("section", [s for s in SECTIONS if s is not schema.RewardPartSection])
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
