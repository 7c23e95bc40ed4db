"""What suites of training backends share: models by flags, and comparisons of names and values."""

from __future__ import annotations

import pytest
import torch

from hybridflow.kit.testing.backend_base import BackendBase
from hybridflow.kit.testing.models import reference


def kit(**flags):
    return type("Kit", (BackendBase,), flags)()


def named(references):
    return [(ref.spec.hf_config["model_type"], ref.spec.kind) for ref in references]


def test_models_are_of_the_flags_architectures_and_kinds():
    two = kit(architectures=("llama", "qwen2"), kinds=("value", "score"))
    assert named(two.references()) == [
        ("llama", "value"),
        ("llama", "score"),
        ("qwen2", "value"),
        ("qwen2", "score"),
    ]
    assert named(two.references("score", "policy")) == [("llama", "score"), ("qwen2", "score")]
    assert named(two.references("policy")) == []


def test_a_backend_that_does_not_train_is_asked_for_no_steps():
    kit()._needs_training()
    with pytest.raises(pytest.skip.Exception, match="does not train"):
        kit(trains=False)._needs_training()


def test_names_that_lack_and_names_that_are_too_many_are_told():
    ref = reference("llama", "score")
    kit()._names(dict(ref.parameters), ref, "layout")
    other = dict(ref.parameters)
    other["lm_head.weight"] = other.pop("score.weight")
    said = r"layout of llama score lacks \['score.weight'\] and has \['lm_head.weight'\]"
    with pytest.raises(AssertionError, match=said):
        kit()._names(other, ref, "layout")


EXPECTED = {"large": torch.tensor([100.0, 1.0]), "small": torch.tensor([0.01, 0.0])}


def same(tolerance=0.1, **changed):
    found = {**EXPECTED, **{name: torch.tensor(values) for name, values in changed.items()}}
    kit(gradient_tolerance=tolerance)._same(found, EXPECTED, "the gradient", "averaged")


def test_a_gradient_is_close_relative_to_its_parameters_largest_entry():
    same(large=[100.0, 11.0])
    with pytest.raises(AssertionError, match=r"(?s)large: the gradient: 12 at entry 1.*averaged"):
        same(large=[100.0, 12.0])


def test_a_parameter_with_hardly_any_gradient_is_measured_by_a_thousandth_of_the_largest():
    """0.1 * max(0.01, 100 / 1000) is 0.01."""
    same(small=[0.0195, 0.0])
    with pytest.raises(AssertionError, match="small: the gradient"):
        same(small=[0.0205, 0.0])


def test_a_missing_gradient_is_named_beside_some_that_are_there():
    with pytest.raises(AssertionError, match=r"no small in the gradient \(there are large"):
        kit()._same({"large": EXPECTED["large"]}, EXPECTED, "the gradient", "")
