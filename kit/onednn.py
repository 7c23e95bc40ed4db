"""Float32 products on CPUs by oneDNN, on machines where it beats MKL.

Torch computes them with MKL, which is slow on processors of other makers: on an AMD EPYC
110 GFLOP/s a core, oneDNN 200 to 265. On Intel's processors MKL is faster. `fits` decides where
oneDNN is used; everywhere else F.linear is.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger(__name__)

MARGIN = 1.25
"""How many times as fast as MKL oneDNN has to be.

The ratio is far from it on either kind of processor (0.9 and about 2), so that measuring again,
when a run is resumed say, chooses the same kernels and gives the same bits.
"""
LEAST_ROWS = 64
"""With fewer rows MKL is as fast, or faster, everywhere."""
PROBE = (512, 256, 768)
"""Rows, inputs and outputs of the product that is measured: 0.2 GFLOP."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias by oneDNN: [..., K], [N, K], [N] -> [..., N].

    All are float32 on the CPU; `weight` may be a transposed view. Without gradients: see `Linear`.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def speedup() -> float:
    """Return how many times as fast as MKL oneDNN is in this process, 0 where torch lacks it.

    The first call takes some 10 ms: it measures the fastest of several rounds of each.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return 0.0
    rows, inputs, outputs = PROBE
    x = torch.ones(rows, inputs)
    weight = torch.ones(outputs, inputs)
    candidates: list[Callable] = [F.linear, linear]
    best = [float("inf"), float("inf")]
    with torch.inference_mode():
        # The first turn makes the kernels; both see the same machine.
        for turn in range(6):
            for index, candidate in enumerate(candidates):
                start = time.perf_counter()
                candidate(x, weight)
                taken = time.perf_counter() - start
                if turn:
                    best[index] = min(best[index], taken)
    ratio = best[0] / best[1]
    log.info("float32 products by %s; oneDNN has %.2f times MKL's speed", chosen(ratio), ratio)
    return ratio


def chosen(ratio: float) -> str:
    """Return the name of the library for float32 products if oneDNN is `ratio` times as fast."""
    return "oneDNN" if ratio >= MARGIN else "MKL"


def is_faster() -> bool:
    """Return whether this process computes large float32 products by oneDNN."""
    return speedup() >= MARGIN


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
    """Make the module's linear layers compute by oneDNN if that is faster on this machine."""
    if not is_faster():
        return
    for part in module.modules():
        # Subclasses of Linear are left alone.
        if type(part) is nn.Linear:
            part.__class__ = Linear
