"""Linear layers by oneDNN: their numbers, and where they are used."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hybridflow.kit import onednn


@pytest.fixture
def faster(monkeypatch):
    """A machine on which oneDNN wins."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_numpy_in_float64(faster, bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 40, bias=bias)
    onednn.use(layer)
    assert type(layer) is onednn.Linear
    x = torch.randn(3, 40, 48, requires_grad=True)
    weights = torch.randn(3, 40, 40)
    y = layer(x)
    assert y.grad_fn.name() == "_ProductBackward"
    (y * weights).sum().backward()

    rows = x.detach().numpy().astype(np.float64).reshape(-1, 48)
    w = layer.weight.detach().numpy().astype(np.float64)
    g = weights.numpy().astype(np.float64).reshape(-1, 40)
    expected = rows @ w.T + (layer.bias.detach().numpy() if bias else 0)
    np.testing.assert_allclose(y.detach().numpy().reshape(-1, 40), expected, atol=2e-5)
    np.testing.assert_allclose(x.grad.numpy().reshape(-1, 48), g @ w, atol=2e-5)
    np.testing.assert_allclose(layer.weight.grad.numpy(), g.T @ rows, atol=1e-4)
    if bias:
        np.testing.assert_allclose(layer.bias.grad.numpy(), g.sum(0), atol=1e-4)


def test_frozen_weights_and_inputs_get_no_gradients(faster):
    layer = nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    onednn.use(layer)
    x = torch.randn(64, 8)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad.tolist() == [64.0] * 8


def test_a_transposed_view_is_a_weight():
    matrix = torch.randn(32, 24)
    x = torch.randn(70, 32)
    torch.testing.assert_close(onednn.linear(x, matrix.t()), x @ matrix, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "x",
    [torch.ones(63, 8), torch.ones(64, 8, dtype=torch.bfloat16), torch.ones(64, 8, device="meta")],
    ids=["few rows", "bfloat16", "another device"],
)
def test_what_it_does_not_take_goes_to_torch(faster, x):
    assert not onednn.fits(x)
    layer = nn.Linear(8, 8, dtype=x.dtype, device=x.device)
    onednn.use(layer)
    assert layer(x).grad_fn.name() != "_ProductBackward"


def cpuinfo(vendor: str) -> str:
    """What Linux writes of a machine with two such cores."""
    return "".join(f"processor\t: {i}\nvendor_id\t: {vendor}\ncpu family\t: 25\n\n" for i in (0, 1))


@pytest.mark.parametrize(
    "text, faster",
    [
        (cpuinfo("AuthenticAMD"), True),
        (cpuinfo("GenuineIntel"), False),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", False),  # an ARM has no vendor_id
        (None, False),
    ],
    ids=["AMD", "Intel", "ARM", "not Linux"],
)
def test_the_processors_maker_decides(tmp_path, monkeypatch, text, faster):
    class Own(nn.Linear):
        pass

    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(onednn, "CPUINFO", path)
    monkeypatch.setattr(onednn, "is_faster", onednn.is_faster.__wrapped__)
    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    onednn.use(module)
    assert [type(part) for part in module] == [onednn.Linear if faster else nn.Linear, Own]
    assert isinstance(copy.deepcopy(module)[0], nn.Linear)


def test_a_build_of_torch_without_it_keeps_its_own(monkeypatch):
    monkeypatch.setattr(onednn, "maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not onednn.is_faster.__wrapped__()
