"""Faults that were once in a backend, or might be, put back: the suite sees each of them."""

from __future__ import annotations

import attrs
import pytest
import torch

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import PARTS
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface import loading
from hybridflow.kit.testing.fake_gpu import FakeCase, FakeGPUConformance, Lived, hollow_model, live

CASE = FakeCase(
    layout=ParallelLayout(dp=8), config=FSDPConfig(precision="bf16"), shards=8, weight_bytes=4.0, outside_gathered=2.0
)  # fmt: skip
LAYERS = 1


class WholeGradients(FSDPBackend):
    """Reduces gradients after the last micro-batch alone."""

    def _set_last(self, last):
        self._gathered[-1].set_requires_gradient_sync(last)


class WholeModel(FSDPBackend):
    """Puts the whole model on the device before it is cut."""

    def _build_module(self):
        super()._build_module()
        loading.allocate(self.module, self.context.device)


class BufferOnTheHost(FSDPBackend):
    """Leaves a shard where it was read."""

    def named_shards(self):
        for name, box, shard in super().named_shards():
            yield name, box, torch.zeros(shard.shape) if "norm" in name else shard


class KeepsMoments(FSDPBackend):
    """Leaves the optimizer's state on the device."""

    def offload(self, parts=PARTS):
        super().offload([part for part in parts if part != "optimizer"])


class MovesEverything(FSDPBackend):
    """Moves weights and moments, whatever was asked for."""

    def offload(self, parts=PARTS):
        super().offload()

    def onload(self, parts=PARTS):
        super().onload()


class CopiesOutAlways(FSDPBackend):
    """Copies weights out that have not changed."""

    def offload(self, parts=PARTS):
        self.residence.changed()
        super().offload(parts)


class KeepsGradients(FSDPBackend):
    """Has gradients between updates."""

    def optim_step(self):
        metrics = super().optim_step()
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        return metrics


class GathersForSync(FSDPBackend):
    """Gathers all parameters before it yields the first shard."""

    def named_shards(self):
        whole = [
            torch.empty(p.shape, dtype=p.dtype, device=self.context.device)
            for p in self.parameters.values()
        ]
        yield from super().named_shards()
        del whole


class ReadsEachLoss(FSDPBackend):
    """Asks each micro-batch whether its loss is finite."""

    def forward_backward(self, micros, needs, loss, temperature=1.0):
        def checked(index, outputs):
            value = loss(index, outputs)
            assert value.item() == value.item()
            return value

        super().forward_backward(micros, needs, checked, temperature)


class ReadsEachNorm(FSDPBackend):
    """Looks at the gradient of every parameter."""

    def optim_step(self):
        for parameter in self.parameters.values():
            assert float(parameter.grad.to_local().norm()) >= 0.0
        return super().optim_step()


FAULTS = {
    ReadsEachLoss: "test_the_host_waits_for_no_micro_batch",
    ReadsEachNorm: "test_the_host_waits_for_no_micro_batch",
    WholeGradients: "test_gradients_are_cut_in_each_micro_batch",
    WholeModel: "test_no_rank_builds_the_whole_model",
    BufferOnTheHost: "test_weights_are_on_the_device",
    KeepsMoments: "test_offload_leaves_nothing",
    MovesEverything: "test_a_forward_pass_moves_no_moment",
    CopiesOutAlways: "test_a_forward_pass_moves_no_moment",
    KeepsGradients: "test_a_rank_holds_its_shard_alone",
    GathersForSync: "test_a_sync_reads_shards",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hollow_model(tmp_path_factory.getbasetemp(), LAYERS)


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda c: c.__name__)
def test_the_suite_sees_the_fault(faulty, folder):
    lived = Lived(attrs.evolve(CASE, saves=False), live(faulty, CASE, folder))
    with pytest.raises(AssertionError, match="likely cause"):
        getattr(FakeGPUConformance(), FAULTS[faulty])(lived)


def test_a_tensor_of_the_wrong_device_is_an_error(folder):
    class Forgets(FSDPBackend):
        def forward_backward(self, micros, *args, **options):
            ids = [
                attrs.evolve(micro, ids=torch.zeros(micro.ids.shape, dtype=torch.int64))
                for micro in micros
            ]
            super().forward_backward(ids, *args, **options)

    with pytest.raises(RuntimeError, match="device"):
        live(Forgets, CASE, folder)


def test_without_a_fault_all_pass(folder):
    lived = Lived(CASE, live(FSDPBackend, CASE, folder))
    for test in set(FAULTS.values()):
        getattr(FakeGPUConformance(), test)(lived)
