"""RMSNorm with a backward pass of its own: its numbers, and which norms of transformers it replaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hybridflow.kit.huggingface import norms


def expected(x, weight, eps, grad):
    """Output and gradients in float64, by finite sums written out for each row."""
    x, weight, grad = (value.detach().numpy().astype(np.float64) for value in (x, weight, grad))
    size = x.shape[-1]
    root = np.sqrt((x**2).sum(-1, keepdims=True) / size + eps)
    of_x = np.zeros_like(x)
    for row in np.ndindex(x.shape[:-1]):
        # d y_j / d x_i = w_j (delta_ij / root - x_i x_j / (size root^3))
        r = root[row][0]
        jacobian = np.diag(weight) / r - np.outer(x[row], x[row] * weight) / (size * r**3)
        of_x[row] = jacobian @ grad[row]
    return x / root * weight, of_x, (grad * x / root).reshape(-1, size).sum(0)


@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 4, 16)])
def test_output_and_gradients_are_those_of_the_formula(shape):
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).requires_grad_()
    weight = torch.randn(shape[-1], requires_grad=True)
    grad = torch.randn(shape)
    y = norms.rms_norm(x, weight, 1e-2)
    y.backward(grad)
    for found, wanted in zip(
        (y.detach(), x.grad, weight.grad), expected(x, weight, 1e-2, grad), strict=True
    ):
        np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5)


def test_a_frozen_weight_and_rows_of_zeros_have_finite_gradients():
    x = torch.zeros(3, 8, requires_grad=True)
    weight = torch.ones(8)
    norms.rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, torch.full((3, 8), 1e3), rtol=1e-5, atol=0)


def test_norms_with_llamas_code_are_replaced_and_others_are_not():
    for kind, same in ((Qwen2RMSNorm, True), (GemmaRMSNorm, False)):
        norm = kind(8)
        norms.use(norm)
        assert isinstance(norm, norms._Norm) == same
        norms.use(norm)
        assert isinstance(norm, kind)


def test_half_precision_and_another_device_are_transformers_own():
    norm = Qwen2RMSNorm(8)
    norms.use(norm)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), Qwen2RMSNorm(8)(x), rtol=0, atol=0)
    assert norm.to("meta")(torch.empty(4, 8, device="meta")).device.type == "meta"


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_has_the_gradients_that_it_had(kind):
    config = AutoConfig.for_model(
        kind, vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(24).view(2, 12)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    before = gradients()
    norms.use(model)
    assert (
        sum(isinstance(part, norms._Norm) for part in model.modules())
        == {"llama": 5, "qwen3": 9}[kind]
    )
    for found, wanted in zip(gradients(), before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
