"""FlashAttention of packed rows in bfloat16, against scaled_dot_product_attention of each row in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridflow.kit.huggingface.attention import PackedRows, attend_packed, takes_any_lengths

LENGTHS = [30, 400, 400, 700]
TAILS = [(1, 20), (1, 33), (0, 300), (3, 1)]
"""(the row that is its prompt, tokens)."""


def row_by_row(query, key, value, tails, scale):
    """Each row by itself; a tail behind its prompt, of which only its own tokens are kept."""
    parts = [x.split([*LENGTHS, *(length for _, length in tails)]) for x in (query, key, value)]
    found = []
    for number, sizes in enumerate(zip(*parts, strict=True)):
        own = len(sizes[0])
        if number >= len(LENGTHS):
            prompt = tails[number - len(LENGTHS)][0]
            sizes = [torch.cat([part[prompt], part[number]]) for part in parts]
        q, k, v = (x.transpose(0, 1)[None] for x in sizes)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        found.append(attended[0].transpose(0, 1)[-own:])
    return torch.cat(found)


@pytest.mark.parametrize("tails", [[], TAILS], ids=["rows", "tails"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(12, 2, 128), (4, 4, 64), (8, 1, 256), (14, 2, 64)]
)
def test_outputs_and_gradients_are_those_of_each_row_alone(heads, key_heads, size, tails):
    device = torch.device("cuda")
    torch.manual_seed(0)
    total = sum(LENGTHS) + sum(length for _, length in tails)
    shapes = [(total, count, size) for count in (heads, key_heads, key_heads)]
    half = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().float().requires_grad_() for x in half]
    assert takes_any_lengths(half[0], half[2])
    found = attend_packed(*half, PackedRows(LENGTHS, device, tails), 0.1)
    wanted = row_by_row(*exact, tails, 0.1)
    torch.testing.assert_close(found.float(), wanted, atol=3e-2, rtol=3e-2)
    weights = torch.randn_like(wanted)
    gradients = torch.autograd.grad((found.float() * weights).sum(), half)
    expected = torch.autograd.grad((wanted * weights).sum(), exact)
    for gradient, want in zip(gradients, expected, strict=True):
        assert (gradient.float() - want).norm() / want.norm() < 2e-2
