"""Every invariant of BackendWeights notices the fault that it is for."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.expect import each_fault
from helpers.faulty_backends import builder, caught_in_backend

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing.backend_weights import BackendWeights


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
        reseeded = attrs.evolve(model, init_seed=model.init_seed + 1000 * self.made)
        super().__init__(reseeded, config, optimizer, context)


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
        mine = self.full_parameters
        self.full_parameters = lambda: iter(renamed.items())
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


FAULTS = {
    "test_weights_are_those_of_the_folder_under_their_names": [PrefixedNames, TransposedWeights],
    "test_random_weights_follow_from_the_seed": [UnseededWeights],
    "test_the_layout_and_the_shards_agree": [BoxesOfTheirOwn, MissingShard],
    "test_shards_are_views_of_the_storage": [CopiedShards],
    "test_an_adopted_storage_holds_the_weights_from_then_on": [AdoptsACopy],
    "test_a_saved_backend_goes_on_bit_for_bit": [ForgetsItsMoments],
    "test_loading_what_is_not_there_says_so": [LoadsNothingQuietly],
    "test_the_export_loads_in_hugging_face": [ExportsOwnNames],
    "test_weights_survive_offloading": [ForgetsWhenOffloaded],
}


@each_fault(BackendWeights, FAULTS)
def test_the_fault_is_noticed(fault, method, tmp_path):
    takes = getattr(BackendWeights, method).__code__.co_varnames
    folder = {"tmp_path": tmp_path} if "tmp_path" in takes[:3] else {}
    caught_in_backend(BackendWeights, fault, method, **folder)


class AdoptsNothing(FSDPBackend):
    def adopt(self, name, storage):
        return False


def test_a_backend_that_adopts_no_storage_skips_it():
    with builder(AdoptsNothing) as build, pytest.raises(pytest.skip.Exception, match="adopts no"):
        BackendWeights().test_an_adopted_storage_holds_the_weights_from_then_on(build)
