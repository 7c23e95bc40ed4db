"""Settings of adapters, and the library that they need."""

from __future__ import annotations

import sys

import pytest

from hybridflow.kit.huggingface.config import LoRAConfig, lora_problems


def test_adapters_need_peft_and_other_models_do_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    assert lora_problems(None) == []
    [problem] = lora_problems(LoRAConfig())
    assert "pip install 'hybridflow[lora]'" in problem


def test_with_peft_there_is_no_problem():
    pytest.importorskip("peft")
    assert lora_problems(LoRAConfig(target_modules=("q_proj",))) == []


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("alpha", 0.0), ("alpha", -1.0)])
def test_a_rank_and_a_scale_must_be_positive(field, value):
    with pytest.raises(ValueError, match=field):
        LoRAConfig(**{field: value})
