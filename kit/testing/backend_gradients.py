"""BackendGradients: a training backend's gradients and steps are those of torch.

Gradients are those of Hugging Face's model under autograd, and steps those of torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybridflow.core.contracts.training import OptimizerConfig, Packing, TrainingBackend
from hybridflow.kit.testing.backend_base import (
    LENGTHS,
    TOKEN_OUTPUTS,
    BackendBase,
    first_output,
)
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.models import Reference, Sequences
from hybridflow.kit.testing.passes import (
    Passes,
    gradients,
    memoryless,
    optimizer_step,
    whole_weights,
)

TWO_MICRO_BATCHES = ([0, 1], [2, 3, 4])
"""The rows of two micro-batches, in order."""
FIVE_MICRO_BATCHES = ([4], [3], [2], [1], [0])
"""One row in each micro-batch, in reverse."""


class BackendGradients(BackendBase):
    """Tests of forward_backward and optim_step.

    Gradients are read through the contract: with AdamW at betas 0 a step moves a weight by
    lr g / (|g| + eps), from which the gradient g follows.
    """

    def test_gradients_are_those_of_hugging_face(self, build):
        """The gradient through each output equals autograd's through the reference."""
        self._needs_training()
        for ref in self.references():
            for name in TOKEN_OUTPUTS[ref.spec.kind]:
                passes = _passes(build, ref, seed=5)
                actual = gradients(passes, [name])
                expected = passes.expected_gradients(ref, [name])

                self._same(
                    actual,
                    expected,
                    f"the gradient of a sum over {name}, {self._name(ref)}",
                    "outputs that the loss gets are detached or scaled, a parameter is frozen, or "
                    "the gradient is averaged over micro-batches or ranks (it is the sum of the "
                    "shares)",
                )

    def test_gradients_do_not_depend_on_the_micro_batches(self, build):
        """Two and five micro-batches have the gradient of a single one."""
        self._needs_training()
        for ref in self.references():
            needs = first_output(ref)
            together = gradients(_passes(build, ref, seed=6), needs)

            for plan in (TWO_MICRO_BATCHES, FIVE_MICRO_BATCHES):
                split = gradients(_passes(build, ref, seed=6), needs, plan=plan)
                self._same(
                    split,
                    together,
                    f"the gradient over {len(plan)} micro-batches, {self._name(ref)}",
                    "the gradient is divided by the number of micro-batches; shares of the loss "
                    "add up, whatever the split",
                )

    def test_packed_rows_have_the_gradients_of_hugging_face(self, build):
        """So do responses to a shared prompt, of several lengths, beside other rows."""
        self._needs_training()
        for ref in self.references():
            if build(ref.spec, memoryless()).packing is Packing.PADDED:
                pytest.skip("it takes padded rows")
            needs = first_output(ref)
            rows = Sequences.with_equal_prompts(seed=10)
            passes = Passes(build(ref.spec, memoryless()), rows, seed=10)
            expected = passes.expected_gradients(ref, needs)
            self._same(
                gradients(passes, needs),
                expected,
                f"the gradient of packed rows, {self._name(ref)}",
                "tokens see those of the row before theirs in the backward pass, or a shared "
                "prompt has the gradient of one of its responses alone",
            )

    def test_dummies_change_no_gradient(self, build):
        """Three dummy micro-batches after the others leave the gradient as it is."""
        self._needs_training()
        for ref in self.references():
            needs = first_output(ref)
            without = gradients(_passes(build, ref, seed=7), needs)
            with_them = gradients(_passes(build, ref, seed=7), needs, dummies=3)

            self._same(
                with_them,
                without,
                f"the gradient with three dummy micro-batches, {self._name(ref)}",
                "dummies (MicroBatch.dummy) are counted; their loss is 0 and they exist so that "
                "all ranks run the same number",
            )

    def test_gradients_add_up_until_the_step_and_are_cleared_by_it(self, build):
        """Two backward passes give twice the gradient; a step that no backward precedes changes
        nothing.
        """
        self._needs_training()
        ref = next(self.references())
        needs = first_output(ref)

        # One step shows the gradients that all backward passes before it accumulated.
        once = gradients(_passes(build, ref, seed=8), needs)
        twice = gradients(_passes(build, ref, seed=8), needs, times=2)
        self._same(
            twice,
            {name: 2 * gradient for name, gradient in once.items()},
            "the gradient of two forward_backward calls",
            "forward_backward clears the gradients; an update may consist of several (batch, loss) "
            "pairs",
        )

        # `gradients` ends with a step, which must leave nothing for the next one.
        passes = _passes(build, ref, seed=8, config=memoryless(lr=1e-3))
        backend = passes.backend
        gradients(passes, needs)
        after = whole_weights(backend)
        second = backend.optim_step()
        weights = backend.full_parameters()
        require(
            second["grad_norm"] == 0.0
            and all(torch.equal(values, after[name]) for name, values in weights),
            got=f"a step without a backward: grad_norm {second['grad_norm']}",
            expected="no gradient left, and weights that stay",
            likely="optim_step does not clear the gradients",
        )

    def test_the_loss_is_called_once_for_each_micro_batch(self, build):
        """Each call has the micro-batch's number in the list; dummies are called for as well."""
        self._needs_training()
        ref = next(self.references())
        passes = _passes(build, ref, seed=9)
        # One micro-batch holds two rows: calls are counted by micro-batch, not by row.
        three = ([0], [1, 2], [3, 4])
        passes.backward(first_output(ref), plan=three, dummies=1)

        require(
            sorted(passes.called) == [0, 1, 2, 3],
            got=f"the loss was called for micro-batches {passes.called}",
            expected="0, 1, 2 and the dummy 3, each once, by its number in the list",
            likely="micro-batches are reordered, skipped or recomputed with the loss inside",
        )

    def test_a_step_is_adamw_with_clipping_and_raises_the_version(self, build):
        """Version, metrics and weights follow torch's AdamW over three steps of a schedule."""
        self._needs_training()
        ref = next(self.references())
        # Every setting has a value whose neglect would show within three steps.
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
        needs = first_output(ref)
        passes = _passes(build, ref, seed=10, config=config)
        step_of_torch = optimizer_step(ref, config)

        for step in range(3):
            passes.backward(needs)
            metrics = passes.backend.optim_step()
            norm, expected = step_of_torch(passes, needs, step)

            require(
                passes.backend.version == step + 1,
                got=f"version {passes.backend.version} after {step + 1} steps",
                expected="one more per step: rollouts and checkpoints go by it",
                likely="optim_step does not add one to `version`",
            )

            norm_tolerance = max(1e-2, 0.1 * self.gradient_tolerance) * norm
            lr = config.lr_at(step)
            require(
                abs(metrics["grad_norm"] - norm) <= norm_tolerance
                and abs(metrics["lr"] - lr) < 1e-9,
                got=f"step {step}: grad_norm {metrics['grad_norm']:.5g}, lr {metrics['lr']:.5g}",
                expected=f"grad_norm {norm:.5g} (before clipping, each parameter once), lr "
                f"{lr:.5g}",
                likely="the norm is taken after clipping or over shards that several ranks hold; "
                "lr is lr_at(version)",
            )
            self._same(
                whole_weights(passes.backend),
                expected,
                f"the weights after step {step + 1}",
                "clipping to max_grad_norm, decoupled weight decay, betas, eps or the schedule "
                "differ from AdamW's",
            )


def _passes(
    build: Callable[..., TrainingBackend],
    ref: Reference,
    seed: int,
    config: OptimizerConfig | None = None,
) -> Passes:
    """Return passes of a new backend over random rows of LENGTHS; by default it is memoryless."""
    backend = build(ref.spec, config or memoryless())
    return Passes(backend, Sequences.random(LENGTHS, seed=seed), seed=seed)
