"""What is read off hidden states, at which places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.megatron_jobs import CPU

pytest.importorskip("megatron.core")

from hybridflow.backends.megatron.cpu import on_cpu
from hybridflow.backends.megatron.outputs import role_outputs
from hybridflow.core.contracts.training import MicroBatch

GENERATOR = torch.Generator().manual_seed(2)
HIDDEN = 6


def chunk(**parts) -> SimpleNamespace:
    """The last chunk of a model on one rank, as far as its outputs read it."""
    return SimpleNamespace(
        pg_collection=SimpleNamespace(tp=dist.group.WORLD), config=SimpleNamespace(sequence_parallel=False),
        share_embeddings_and_output_weights=False, **parts,
    )  # fmt: skip


IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 0, 0, 0]])
MICRO = MicroBatch(IDS, torch.tensor([2, 1]), torch.tensor([3, 1]))
"""Two prompt tokens and three of a response; one and one."""


def test_outputs_stand_at_the_state_before_each_response_token(alone):
    hidden = torch.randn(5, 2, HIDDEN, generator=GENERATOR)  # [S, B, H]
    weight = torch.randn(8, HIDDEN, generator=GENERATOR)
    starts = torch.tensor([0, 5])
    with on_cpu(CPU):
        found = role_outputs(
            chunk(output_layer=SimpleNamespace(weight=weight)),
            hidden,
            MICRO,
            starts,
            ["logprobs"],
            1.0,
            8,
        )["logprobs"]
    log_p = (hidden @ weight.T).log_softmax(-1)  # [S, B, V]
    want = [[log_p[1, 0, 4], log_p[2, 0, 1], log_p[3, 0, 5]], [log_p[0, 1, 7], 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(want))


def test_packed_rows_are_found_where_they_start(alone):
    flat = torch.randn(
        7, 1, HIDDEN, generator=GENERATOR
    )  # five tokens of the first row, two of the second
    score = torch.nn.Linear(HIDDEN, 1, bias=False)
    starts = torch.tensor([0, 5])
    with on_cpu(CPU), torch.no_grad():
        values = role_outputs(chunk(score=score), flat, MICRO, starts, ["values"], 1.0, 8)["values"]
        scores = role_outputs(chunk(score=score), flat, MICRO, starts, ["scores"], 1.0, 8)["scores"]
        each = score(flat)[:, 0, 0]
    torch.testing.assert_close(
        values, torch.stack([each[[1, 2, 3]], torch.tensor([each[5], 0.0, 0.0])])
    )
    torch.testing.assert_close(scores, each[[4, 6]])  # at the last token of each
