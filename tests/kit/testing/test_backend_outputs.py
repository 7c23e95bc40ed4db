"""Every invariant of BackendOutputs notices the fault that it is for."""

from __future__ import annotations

import pytest
from helpers.expect import each_fault
from helpers.faulty_backends import caught_in_backend

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.kit.huggingface.attention import PackedRows
from hybridflow.kit.testing.backend_outputs import BackendOutputs


class OffByOne(FSDPBackend):
    def forward(self, micros, needs, temperature=1.0):
        found = super().forward(micros, needs, temperature)
        return [{n: v.roll(1, 1) for n, v in outputs.items()} for outputs in found]


class NoTemperature(FSDPBackend):
    def forward(self, micros, needs, temperature=1.0):
        return super().forward(micros, needs, 1.0)


class BackwardsMicroBatches(FSDPBackend):
    """Longest first, and never put back."""

    def forward(self, micros, needs, temperature=1.0):
        order = sorted(range(len(micros)), key=lambda i: -micros[i].ids.shape[1])
        return super().forward([micros[i] for i in order], needs, temperature)


class SeesNeighbours(FSDPBackend):
    """All tokens before a token, whichever row they are of."""

    def build(self):
        super().build()
        trunk = self.module.hf.base_model
        forward = trunk.forward
        trunk.forward = lambda packed_rows=None, **inputs: forward(**inputs)


class FirstOfEachPrompt(FSDPBackend):
    """Every response goes on from the first prompt of its length."""

    def build(self):
        super().build()
        trunk = self.module.hf.base_model
        forward = trunk.forward

        def confused(packed_rows=None, **inputs):
            if packed_rows is not None:
                first = [
                    packed_rows.lengths.index(packed_rows.lengths[r]) for r, _ in packed_rows.tails
                ]
                tails = [(r, n) for r, (_, n) in zip(first, packed_rows.tails, strict=True)]
                packed_rows = PackedRows(packed_rows.lengths, packed_rows.device, tails)
            return forward(packed_rows=packed_rows, **inputs)

        trunk.forward = confused


class KeepsTheGraph(FSDPBackend):
    def forward(self, micros, needs, temperature=1.0):
        return [self.module(micro, needs, temperature) for micro in micros]


class HalfPrecisionOutputs(FSDPBackend):
    def forward(self, micros, needs, temperature=1.0):
        found = super().forward(micros, needs, temperature)
        return [{n: v.bfloat16() for n, v in outputs.items()} for outputs in found]


FAULTS = {
    "test_outputs_are_those_of_hugging_face": [OffByOne, NoTemperature],
    "test_the_largest_logprobs_and_those_of_given_tokens_are_those_of_hugging_face": [OffByOne],
    "test_outputs_do_not_depend_on_the_micro_batches": [BackwardsMicroBatches],
    "test_packed_rows_do_not_see_each_other": [SeesNeighbours],
    "test_rows_with_equal_prompts_have_the_outputs_of_rows_alone": [
        SeesNeighbours,
        FirstOfEachPrompt,
    ],
    "test_a_forward_keeps_no_graph_and_gives_float32": [KeepsTheGraph, HalfPrecisionOutputs],
}


@each_fault(BackendOutputs, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught_in_backend(BackendOutputs, fault, method)


@pytest.mark.parametrize("lacks", [{"topk": False}, {"kinds": ("value",)}])
def test_a_backend_without_top_k_or_without_policies_skips_it(lacks):
    kit = type("Kit", (BackendOutputs,), lacks)()
    with pytest.raises(pytest.skip.Exception, match="no top-k"):
        kit.test_the_largest_logprobs_and_those_of_given_tokens_are_those_of_hugging_face(None)
