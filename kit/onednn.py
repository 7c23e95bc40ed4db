"""Float32 products on CPUs by oneDNN, on processors where it beats MKL.

Torch computes them with MKL, which is slow on processors of other makers: on an AMD EPYC
110 GFLOP/s a core, oneDNN 200 to 265. On Intel's processors MKL is faster. `fits` decides where
oneDNN is used; everywhere else F.linear is.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MAKERS = {"AuthenticAMD"}
"""Makers on whose processors oneDNN was measured to be about twice as fast as MKL."""
CPUINFO = Path("/proc/cpuinfo")
LEAST_ROWS = 64
"""With fewer rows MKL is as fast, or faster, everywhere."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias by oneDNN: [..., K], [N, K], [N] -> [..., N].

    All are float32 on the CPU; `weight` may be a transposed view. Without gradients: see `Linear`.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def is_faster() -> bool:
    """Return whether large float32 products are oneDNN's on this machine, by its processor.

    It is not measured: a busy machine could choose other kernels for one rank or for a resumed
    run, and so other last digits.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and maker() in MAKERS
    )


def maker() -> str | None:
    """Return the processor's vendor_id as Linux gives it, None on other systems and processors."""
    if not CPUINFO.exists():
        return None
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return None


def fits(x: torch.Tensor) -> bool:
    """Return whether oneDNN is used for `x` [..., K]: plain, float32, on the CPU, enough rows.

    It is not for DTensors and the tensors of a trace.
    """
    return (
        type(x) is torch.Tensor
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() >= LEAST_ROWS * x.shape[-1]
    )


class Linear(nn.Linear):
    """A linear layer that uses oneDNN where `fits` is true; `use` converts existing layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # A compiler has kernels of its own.
        if torch.compiler.is_compiling() or not fits(input):
            return F.linear(input, self.weight, self.bias)
        return _Product.apply(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """x W^T + b, with dx = g W, dW = g^T x and db = the sum of g over rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2)
        grad = grads[0].flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            # Contiguous copies cost less than oneDNN loses on strided inputs.
            linear(grad, weight.t().contiguous()).view(x.shape) if needs_x else None,
            linear(grad.t().contiguous(), rows.t().contiguous()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def use(module: nn.Module) -> None:
    """Make the module's linear layers compute by oneDNN where `is_faster` says so."""
    if not is_faster():
        return
    for part in module.modules():
        # Subclasses of Linear are left alone.
        if type(part) is nn.Linear:
            part.__class__ = Linear
