"""A backend's gradients are those of Hugging Face's model under autograd, and its steps those of AdamW."""

from __future__ import annotations

import torch

from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.kit.testing.backend_base import LENGTHS, TOKEN_OUTPUTS, BackendBase
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.models import Sequences
from hybridflow.kit.testing.passes import (
    Passes,
    gradients,
    memoryless,
    optimizer_step,
    whole_weights,
)


class BackendGradients(BackendBase):
    """forward_backward and optim_step. Gradients are read through the contract: with AdamW at betas 0 a step moves a
    weight by lr g / (|g| + eps), from which g follows."""

    def test_gradients_are_those_of_hugging_face(self, build):
        self._needs_training()
        for ref in self.references():
            for needs in [[n] for n in TOKEN_OUTPUTS[ref.spec.kind]]:
                passes = Passes(
                    build(ref.spec, memoryless()), Sequences.random(LENGTHS, seed=5), seed=5
                )
                found, expected = gradients(passes, needs), passes.expected_gradients(ref, needs)
                self._same(
                    found,
                    expected,
                    f"the gradient of a sum over {needs[0]}, {self._name(ref)}",
                    "outputs that the loss gets are detached or scaled, a parameter is frozen, or the gradient "
                    "is averaged over "
                    "micro-batches or ranks (it is the sum of the shares)",
                )

    def test_gradients_do_not_depend_on_the_micro_batches(self, build):
        self._needs_training()
        for ref in self.references():
            needs = [TOKEN_OUTPUTS[ref.spec.kind][0]]
            rows = Sequences.random(LENGTHS, seed=6)
            whole = gradients(Passes(build(ref.spec, memoryless()), rows, seed=6), needs)
            for plan in ([[0, 1], [2, 3, 4]], [[4], [3], [2], [1], [0]]):
                split = gradients(
                    Passes(build(ref.spec, memoryless()), rows, seed=6), needs, plan=plan
                )
                self._same(
                    split,
                    whole,
                    f"the gradient over {len(plan)} micro-batches, {self._name(ref)}",
                    "the gradient is divided by the number of micro-batches; shares of the loss add up, whatever the "
                    "split",
                )

    def test_dummies_change_no_gradient(self, build):
        self._needs_training()
        for ref in self.references():
            needs = [TOKEN_OUTPUTS[ref.spec.kind][0]]
            rows = Sequences.random(LENGTHS, seed=7)
            without = gradients(Passes(build(ref.spec, memoryless()), rows, seed=7), needs)
            with_them = gradients(
                Passes(build(ref.spec, memoryless()), rows, seed=7), needs, dummies=3
            )
            self._same(
                with_them,
                without,
                f"the gradient with three dummy micro-batches, {self._name(ref)}",
                "dummies (MicroBatch.dummy) are counted; their loss is 0 and they exist so that all ranks run the "
                "same number",
            )

    def test_gradients_add_up_until_the_step_and_are_cleared_by_it(self, build):
        self._needs_training()
        ref = next(self.references())
        needs, rows = [TOKEN_OUTPUTS[ref.spec.kind][0]], Sequences.random(LENGTHS, seed=8)
        once = gradients(Passes(build(ref.spec, memoryless()), rows, seed=8), needs)
        twice = gradients(Passes(build(ref.spec, memoryless()), rows, seed=8), needs, times=2)
        self._same(
            twice,
            {n: 2 * g for n, g in once.items()},
            "the gradient of two forward_backward calls",
            "forward_backward clears the gradients; an update may consist of several (batch, loss) pairs",
        )
        backend = build(ref.spec, memoryless(lr=1e-3))
        gradients(Passes(backend, rows, seed=8), needs)
        after = whole_weights(backend)
        second = backend.optim_step()
        require(
            second["grad_norm"] == 0.0
            and all(torch.equal(p, after[n]) for n, p in backend.full_parameters()),
            got=f"a step without a backward: grad_norm {second['grad_norm']}",
            expected="no gradient left, and weights that stay",
            likely="optim_step does not clear the gradients",
        )

    def test_the_loss_is_called_once_for_each_micro_batch(self, build):
        self._needs_training()
        ref = next(self.references())
        passes = Passes(build(ref.spec, memoryless()), Sequences.random(LENGTHS, seed=9), seed=9)
        passes.backward([TOKEN_OUTPUTS[ref.spec.kind][0]], plan=[[0], [1, 2], [3, 4]], dummies=1)
        require(
            sorted(passes.called) == [0, 1, 2, 3],
            got=f"the loss was called for micro-batches {passes.called}",
            expected="0, 1, 2 and the dummy 3, each once, by its number in the list",
            likely="micro-batches are reordered, skipped or recomputed with the loss inside",
        )

    def test_a_step_is_adamw_with_clipping_and_raises_the_version(self, build):
        self._needs_training()
        ref = next(self.references())
        config = OptimizerConfig(
            lr=1e-2,
            betas=(0.8, 0.9),
            eps=1e-6,
            weight_decay=0.1,
            max_grad_norm=0.5,
            warmup_steps=2,
            schedule="linear",
            total_steps=5,
        )
        needs = [TOKEN_OUTPUTS[ref.spec.kind][0]]
        passes = Passes(build(ref.spec, config), Sequences.random(LENGTHS, seed=10), seed=10)
        optimizer_step_of_torch = optimizer_step(ref, config)
        for step in range(3):
            passes.backward(needs)
            metrics = passes.backend.optim_step()
            norm, expected = optimizer_step_of_torch(passes, needs, step)
            require(
                passes.backend.version == step + 1,
                got=f"version {passes.backend.version} after {step + 1} steps",
                expected="one more per step: rollouts and checkpoints go by it",
                likely="optim_step does not add one to `version`",
            )
            require(
                abs(metrics["grad_norm"] - norm) <= max(1e-2, 0.1 * self.gradient_tolerance) * norm
                and abs(metrics["lr"] - config.lr_at(step)) < 1e-9,
                got=f"step {step}: grad_norm {metrics['grad_norm']:.5g}, lr {metrics['lr']:.5g}",
                expected=f"grad_norm {norm:.5g} (before clipping, each parameter once), lr {config.lr_at(step):.5g}",
                likely="the norm is taken after clipping or over shards that several ranks hold; lr is lr_at(version)",
            )
            self._same(
                whole_weights(passes.backend),
                expected,
                f"the weights after step {step + 1}",
                "clipping to max_grad_norm, decoupled weight decay, betas, eps or the schedule differ from AdamW's",
            )
