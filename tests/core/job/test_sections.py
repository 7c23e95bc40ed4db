"""The sections of a file: defaults that work, every field explained, validators that say what to do."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.errors import ConfigError
from hybridflow.core.job import sections
from hybridflow.settle.config.field_docs import field_docs
from hybridflow.settle.config.structure import structure

SECTIONS = [
    sections.RunSection,
    sections.LayoutSection,
    sections.RewardPart,
    sections.RoleSection,
    sections.ValidationSection,
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_says_what_it_means(section):
    docs = field_docs(section)
    explained_by_its_doc = {"steps", "samples"}
    for field in attrs.fields(section):
        assert docs.get(field.name), f"{section.__name__}.{field.name} has no docstring"
        assert len(docs[field.name]) > 10 or field.name in explained_by_its_doc


@pytest.mark.parametrize(
    "section, field, value, said",
    [
        (sections.RunSection, "steps", 0, "must be at least 1, got 0; give 1 or more"),
        (sections.RunSection, "seed", -1, "must be 0 or more, got -1"),
        (sections.RunSection, "device", "tpu", 'expected one of "auto", "cpu", "cuda", got'),
        (sections.RunSection, "checkpoint_every", -1, "must be 0 or more"),
        (sections.RunSection, "keep_checkpoints", 0, "must be at least 1"),
        (sections.RunSection, "restarts", -1, "must be 0 or more"),
        (sections.RunSection, "max_staleness", -1, "must be 0 or more"),
        (sections.LayoutSection, "dp", 0, "must be at least 1"),
        (sections.LayoutSection, "tp", 0, "must be at least 1"),
        (sections.RoleSection, "micro_batch_tokens", 0, "must be at least 1"),
        (sections.ValidationSection, "every", -1, "must be 0 or more"),
        (sections.ValidationSection, "batch_rows", 0, "must be above 0"),
    ],
)
def test_a_value_that_cannot_be_says_what_was_got_and_what_to_give(section, field, value, said):
    with pytest.raises(ConfigError) as error:
        structure({field: value}, section, "here")
    [problem] = error.value.problems
    assert problem.startswith(f"here.{field}: ") and said in problem, problem
