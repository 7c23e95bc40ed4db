"""Terms that cannot be reduced are refused where they are made."""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.contracts.loss import REDUCTIONS, Term

VALUE = torch.ones(2, 3)


def test_a_maximum_is_reported_and_not_trained_on():
    assert Term("ratio_max", VALUE, how="max", weight=0).how == "max"
    with pytest.raises(
        ValueError,
        match=r"'ratio_max': .*\(weight=0\)",
    ):
        Term("ratio_max", VALUE, how="max")


def test_a_sum_over_a_constant_length_needs_that_length():
    assert Term("policy", VALUE, how="seq-mean-token-sum-norm", length=8).length == 8
    for length in (None, 0):
        with pytest.raises(ValueError, match="term 'policy': seq-mean-token-sum-norm needs length"):
            Term("policy", VALUE, how="seq-mean-token-sum-norm", length=length)


def test_a_reduction_of_another_name_is_refused():
    with pytest.raises(ValueError, match="'how' must be in"):
        Term("policy", VALUE, how="mean")
    for how in REDUCTIONS:
        assert Term("policy", VALUE, how=how, weight=0, length=1).how == how
