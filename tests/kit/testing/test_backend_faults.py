"""Every invariant of TrainingBackendConformance notices the fault that it is for: FSDP, broken on purpose."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.expect import caught

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing import TrainingBackendConformance, one_rank


class Kit(TrainingBackendConformance):
    architectures, kinds = ("qwen2",), ("policy",)


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


class KeepsTheGraph(FSDPBackend):
    def forward(self, micros, needs, temperature=1.0):
        return [self.module(micro, needs, temperature) for micro in micros]


class HalfPrecisionOutputs(FSDPBackend):
    def forward(self, micros, needs, temperature=1.0):
        found = super().forward(micros, needs, temperature)
        return [{n: v.bfloat16() for n, v in outputs.items()} for outputs in found]


class DetachedOutputs(FSDPBackend):
    def forward_backward(self, micros, needs, loss, temperature=1.0):
        def detached(at, outputs):
            return loss(at, {n: v.detach() + 0 * v for n, v in outputs.items()})

        super().forward_backward(micros, needs, detached, temperature)


class FrozenEmbedding(FSDPBackend):
    def optim_step(self):
        for name, p in self.parameters.items():
            if "embed" in name and p.grad is not None:
                p.grad.zero_()
        return super().optim_step()


class MeanOverMicroBatches(FSDPBackend):
    def forward_backward(self, micros, needs, loss, temperature=1.0):
        super().forward_backward(micros, needs, lambda at, o: loss(at, o) / len(micros), temperature)


class MeanOverAllButDummiesCount(FSDPBackend):
    """Right without dummies: scaled by all micro-batches over those that are none."""

    def forward_backward(self, micros, needs, loss, temperature=1.0):
        real = sum(not m.dummy for m in micros)
        super().forward_backward(micros, needs, lambda at, o: loss(at, o) * real / len(micros), temperature)


class ClearsBeforeTheBackward(FSDPBackend):
    def forward_backward(self, micros, needs, loss, temperature=1.0):
        for p in self.parameters.values():
            p.grad = None
        super().forward_backward(micros, needs, loss, temperature)


class KeepsItsGradients(FSDPBackend):
    def optim_step(self):
        grads = {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}
        metrics = super().optim_step()
        for name, grad in grads.items():
            self.parameters[name].grad = grad
        return metrics


class SkipsDummies(FSDPBackend):
    def forward_backward(self, micros, needs, loss, temperature=1.0):
        super().forward_backward([m for m in micros if not m.dummy], needs, loss, temperature)


class KeepsItsVersion(FSDPBackend):
    def optim_step(self):
        metrics, self.version = super().optim_step(), 0
        return metrics


class NormAfterClipping(FSDPBackend):
    def optim_step(self):
        metrics = super().optim_step()
        limit = self.optimizer_config.max_grad_norm or float("inf")
        return Metrics.of(grad_norm=min(metrics["grad_norm"], limit), lr=metrics["lr"])


class NoWeightDecay(FSDPBackend):
    def __init__(self, model, config, optimizer, context):
        super().__init__(model, config, optimizer and attrs.evolve(optimizer, weight_decay=0.0), context)


class PrefixedNames(FSDPBackend):
    def full_parameters(self):
        return ((f"module.{n}", p) for n, p in super().full_parameters())


class TransposedWeights(FSDPBackend):
    def full_parameters(self):
        for name, p in super().full_parameters():
            yield name, p.T.contiguous().T.flip(0) if "q_proj.weight" in name else p


class UnseededWeights(FSDPBackend):
    made = 0

    def __init__(self, model, config, optimizer, context):
        UnseededWeights.made += 1
        super().__init__(attrs.evolve(model, init_seed=model.init_seed + 1000 * self.made), config, optimizer, context)


class BoxesOfTheirOwn(FSDPBackend):
    def named_shards(self):
        for name, box, tensor in super().named_shards():
            shifted = tuple(s + 1 for s in box.start), tuple(s + 1 for s in box.stop)
            yield name, Box(*shifted) if "norm" in name else box, tensor


class MissingShard(FSDPBackend):
    def named_shards(self):
        return (s for s in super().named_shards() if "norm" not in s[0])


class CopiedShards(FSDPBackend):
    def named_shards(self):
        return ((n, box, tensor.clone()) for n, box, tensor in super().named_shards())


class ForgetsItsMoments(FSDPBackend):
    def load(self, folder):
        super().load(folder)
        for moments in self.optimizer.moments().values():
            for values in moments.values():
                values.zero_()


class LoadsNothingQuietly(FSDPBackend):
    def load(self, folder):
        if folder.exists():
            super().load(folder)


class ExportsOwnNames(FSDPBackend):
    def export_hf(self, folder):
        renamed = {n.replace("self_attn", "attention"): p for n, p in self.parameters.items()}
        mine, self.full_parameters = self.full_parameters, lambda: iter(renamed.items())
        try:
            super().export_hf(folder)
        finally:
            self.full_parameters = mine


class ForgetsWhenOffloaded(FSDPBackend):
    def offload(self):
        with torch.no_grad():
            for p in self.parameters.values():
                p.zero_()


class AdoptsACopy(FSDPBackend):
    def adopt(self, name, storage):
        storage.copy_(self.parameters[name].detach())
        return super().adopt(name, storage.clone())


FAULTS = [
    (OffByOne, "test_outputs_are_those_of_hugging_face", "off by one"),
    (NoTemperature, "test_outputs_are_those_of_hugging_face", "temperature 0.6"),
    (OffByOne, "test_the_largest_logprobs_and_those_of_given_tokens_are_those_of_hugging_face", "topk_ids"),
    (BackwardsMicroBatches, "test_outputs_do_not_depend_on_the_micro_batches", "another order"),
    (KeepsTheGraph, "test_a_forward_keeps_no_graph_and_gives_float32", "no_grad"),
    (HalfPrecisionOutputs, "test_a_forward_keeps_no_graph_and_gives_float32", "float32"),
    (DetachedOutputs, "test_gradients_are_those_of_hugging_face", "detached"),
    (FrozenEmbedding, "test_gradients_are_those_of_hugging_face", "embed_tokens"),
    (MeanOverMicroBatches, "test_gradients_do_not_depend_on_the_micro_batches", "number of micro-batches"),
    (MeanOverAllButDummiesCount, "test_dummies_change_no_gradient", "dummies"),
    (ClearsBeforeTheBackward, "test_gradients_add_up_until_the_step_and_are_cleared_by_it", "clears the gradients"),
    (KeepsItsGradients, "test_gradients_add_up_until_the_step_and_are_cleared_by_it", "does not clear"),
    (SkipsDummies, "test_the_loss_is_called_once_for_each_micro_batch", "each once"),
    (KeepsItsVersion, "test_a_step_is_adamw_with_clipping_and_raises_the_version", "version"),
    (NormAfterClipping, "test_a_step_is_adamw_with_clipping_and_raises_the_version", "before clipping"),
    (NoWeightDecay, "test_a_step_is_adamw_with_clipping_and_raises_the_version", "weight decay"),
    (PrefixedNames, "test_weights_are_those_of_the_folder_under_their_names", "wrapper prefixes"),
    (TransposedWeights, "test_weights_are_those_of_the_folder_under_their_names", "q_proj"),
    (UnseededWeights, "test_random_weights_follow_from_the_seed", "init_seed"),
    (BoxesOfTheirOwn, "test_the_layout_and_the_shards_agree", "canonical"),
    (MissingShard, "test_the_layout_and_the_shards_agree", "the same boxes"),
    (CopiedShards, "test_shards_are_views_of_the_storage", "copies"),
    (AdoptsACopy, "test_an_adopted_storage_holds_the_weights_from_then_on", "the optimizer goes on"),
    (ForgetsItsMoments, "test_a_saved_backend_goes_on_bit_for_bit", "moments"),
    (LoadsNothingQuietly, "test_loading_what_is_not_there_says_so", "without a word"),
    (ExportsOwnNames, "test_the_export_loads_in_hugging_face", ""),
    (ForgetsWhenOffloaded, "test_weights_survive_offloading", "onload"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "method", "says"), FAULTS, ids=[f"{f.__name__}-{m}" for f, m, _ in FAULTS])
def test_the_fault_is_noticed(fault, method, says, tmp_path):
    with one_rank() as context:

        def build(spec, optimizer):
            backend = fault(spec, FSDPConfig(), optimizer, context)
            backend.build()
            return backend

        takes = getattr(Kit, method).__code__.co_varnames[:3]
        caught(Kit, method, says, build=build, **({"tmp_path": tmp_path} if "tmp_path" in takes else {}))


def test_each_invariant_has_a_fault():
    invariants = {m for m in dir(TrainingBackendConformance) if m.startswith("test_")}
    assert invariants == {method for _, method, _ in FAULTS}
