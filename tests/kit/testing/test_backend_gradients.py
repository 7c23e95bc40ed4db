"""Every invariant of BackendGradients notices the fault that it is for."""

from __future__ import annotations

import attrs
import pytest
from helpers.expect import each_fault
from helpers.faulty_backends import caught_in_backend

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.core.values.metrics import Metrics
from hybridflow.kit.testing.backend_gradients import BackendGradients


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
        def share(at, outputs):
            return loss(at, outputs) / len(micros)

        super().forward_backward(micros, needs, share, temperature)


class MeanOverAllButDummiesCount(FSDPBackend):
    """Right without dummies: scaled by all micro-batches over those that are none."""

    def forward_backward(self, micros, needs, loss, temperature=1.0):
        real = sum(not m.dummy for m in micros)

        def scaled(at, outputs):
            return loss(at, outputs) * real / len(micros)

        super().forward_backward(micros, needs, scaled, temperature)


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
        real = [m for m in micros if not m.dummy]
        super().forward_backward(real, needs, loss, temperature)


class TwiceWhatIsPacked(FSDPBackend):
    def forward_backward(self, micros, needs, loss, temperature=1.0):
        def share(at, outputs):
            return loss(at, outputs) * (1 if micros[at].prompt_at is None else 2)

        super().forward_backward(micros, needs, share, temperature)


class KeepsItsVersion(FSDPBackend):
    def optim_step(self):
        metrics = super().optim_step()
        self.version = 0
        return metrics


class NormAfterClipping(FSDPBackend):
    def optim_step(self):
        metrics = super().optim_step()
        limit = self.optimizer_config.max_grad_norm or float("inf")
        return Metrics.of(grad_norm=min(metrics["grad_norm"], limit), lr=metrics["lr"])


class NoWeightDecay(FSDPBackend):
    def __init__(self, model, config, optimizer, context):
        without = optimizer and attrs.evolve(optimizer, weight_decay=0.0)
        super().__init__(model, config, without, context)


FAULTS = {
    "test_gradients_are_those_of_hugging_face": [DetachedOutputs, FrozenEmbedding],
    "test_gradients_do_not_depend_on_the_micro_batches": [MeanOverMicroBatches],
    "test_packed_rows_have_the_gradients_of_hugging_face": [TwiceWhatIsPacked],
    "test_dummies_change_no_gradient": [MeanOverAllButDummiesCount],
    "test_gradients_add_up_until_the_step_and_are_cleared_by_it": [
        ClearsBeforeTheBackward,
        KeepsItsGradients,
    ],
    "test_the_loss_is_called_once_for_each_micro_batch": [SkipsDummies],
    "test_a_step_is_adamw_with_clipping_and_raises_the_version": [
        KeepsItsVersion,
        NormAfterClipping,
        NoWeightDecay,
    ],
}


@each_fault(BackendGradients, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught_in_backend(BackendGradients, fault, method)


@pytest.mark.parametrize("method", FAULTS)
def test_a_backend_that_does_not_train_skips_them_all(method):
    class Scores(BackendGradients):
        trains = False

    with pytest.raises(pytest.skip.Exception, match="does not train"):
        getattr(Scores(), method)(build=None)
