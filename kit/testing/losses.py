"""LossConformance: checks a Loss on random mini-batches of ragged rows.

Padding, masked tokens and the split into micro-batches must not change the loss. Every column that
it reads must be declared, and its gradients must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.kit.testing.checks import missing_fixture, require, require_close
from hybridflow.kit.testing.minibatch import MiniBatch, Result, Undeclared, evaluate
from hybridflow.kit.testing.random_columns import RowShapes, standard_column

NOT_READ = "masked tokens"
GARBAGE = ((-3e3, 3e3), (7.0, -7.0), (2e4, float("nan")))
"""Numbers for masked tokens: (in the outputs, in the float columns)."""
MOVES = (0.0, 60.0, -60.0, 2000.0, -2000.0)
"""Log ratios; exp of the larger ones overflows, or is 0, in float32."""


class LossConformance:
    """Subclass it and give a fixture `loss`: your Loss (or override `losses`: role -> Loss).

    Mini-batches are random and ragged, made of what the loss reads and needs. Override `columns`
    for columns that the kit does not know, or whose range your loss depends on.
    """

    rows = 12
    """Rows of a mini-batch."""
    longest = 9
    """Tokens of its longest response."""
    unit_size = 2
    """Rows of a unit, where the loss has units ("pair", "group")."""
    trials = 3
    """Random mini-batches per test."""
    tolerance = 2e-5
    """Relative tolerance of the loss, its metrics and its gradients."""
    uses_all_it_reads = True
    """Whether every declared column and output must be used on each call."""

    @pytest.fixture
    def loss(self) -> Loss:
        """The author's loss."""
        return missing_fixture(self, "loss", "an instance of your Loss")

    @pytest.fixture
    def losses(self, loss) -> Mapping[str, Loss]:
        """The losses to check, by role; by default only `loss`, under its class's name."""
        return {type(loss).__name__: loss}

    def columns(self, name: str, shape: RowShapes) -> Any:
        """Return random values for a column.

        They are shape.per_token(...), shape.per_row(...), a tensor [rows] or a list of objects.
        """
        return standard_column(name, shape)

    # --- invariants ---

    def test_the_split_into_micro_batches_and_ranks_changes_nothing(self, losses):
        """Every split that keeps units whole gives the result of the mini-batch in one piece."""
        for name, loss, mini in self._cases(losses):
            whole = _in_one_piece(loss, mini)
            for plan in mini.plans():
                self._same(
                    evaluate(loss, mini, plan),
                    whole,
                    f"{name}: over {len(plan)} micro-batches",
                    "a local mean (value.mean(), or a division by the micro-batch's mask.sum()): "
                    "return [B, T] values in a Term and let the core divide by the counts of the "
                    "mini-batch. Or the loss looks at several rows together: "
                    'then declare unit = "pair" or "group"',
                )

    def test_padding_changes_nothing(self, losses):
        """Rows padded by five more columns give the same result."""
        for name, loss, mini in self._cases(losses):
            whole = _in_one_piece(loss, mini)
            self._same(
                _in_one_piece(loss, mini, extra=5),
                whole,
                f"{name}: with five columns of padding more",
                "a mean or a sum over all of [B, T], padding included; let the Term's mask (by "
                "default loss_mask) decide what counts",
            )

    def test_what_the_mask_hides_changes_nothing(self, losses):
        """Garbage where loss_mask is 0 changes no result, and gets a gradient of exactly 0."""
        for name, loss, mini in self._cases(losses):
            clean = _in_one_piece(loss, mini)
            for garbage, in_columns in GARBAGE:
                result = _in_one_piece(loss, mini.with_garbage(garbage, in_columns))
                self._same(
                    result,
                    clean,
                    f"{name}: with {garbage:g} under the zeros of loss_mask",
                    "tokens that the policy did not produce (tool output, padding) count: use "
                    "batch['loss_mask'] in every sum over tokens, as the Term's mask or inside "
                    "the loss",
                )

                # A row has one score, which no token's mask hides.
                for output, gradients in result.gradients.items():
                    if output == "scores":
                        continue
                    leaked = _largest_hidden_sum(gradients, mini.masks)
                    require(
                        leaked == 0,
                        got=f"{name}: a gradient of {leaked:g} to outputs[{output!r}] of "
                        f"{NOT_READ}",
                        expected="exactly 0",
                        likely="the mask is applied to the value and not to what it is computed "
                        "from, or by adding instead of multiplying",
                    )

    def test_only_declared_columns_are_read(self, losses):
        """The loss reads what it declares; and all of it, unless `uses_all_it_reads` is off."""
        for name, loss, mini in self._cases(losses, 1):
            try:
                result = _in_one_piece(loss, mini)
            except Undeclared as error:
                require(
                    False,
                    got=f"{name} asks for {error.what}, which it does not declare",
                    expected=f"reads {list(loss.reads)} and needs {list(loss.needs)} to name "
                    "everything",
                    likely=f"add it to `{error.field}` of {type(loss).__name__}: only declared "
                    "columns travel to the ranks",
                )

            # A declared column that no call asked for is sent to the ranks in vain.
            if self.uses_all_it_reads:
                unread = {*loss.reads} - result.read
                unneeded = {*loss.needs} - result.needed
                unused = sorted(unread | unneeded)
                require(
                    not unused,
                    got=f"{name} declares {unused} and does not use them",
                    expected="columns that are read: each one travels to every rank in every "
                    "mini-batch",
                    likely="drop them from reads or needs, under the settings that do not use them",
                )

    def test_zero_advantages_give_no_policy_gradient(self, losses):
        """A term whose gradient depends on the advantages has none where these are all 0."""
        tried = False
        for name, loss, mini in self._cases(losses):
            # The losses of critics, for instance, read none.
            if "advantages" not in loss.reads:
                continue

            tried = True
            # The mini-batch twice, with its advantages and without.
            zeroed = mini.with_column("advantages", lambda values: values * 0)
            at_zero = _in_one_piece(loss, zeroed)
            with_advantages = _in_one_piece(loss, mini)

            # Terms whose gradient stays the same do not depend on the advantages, and may have one.
            for term, gradients in at_zero.term_gradients.items():
                pairs = zip(gradients, with_advantages.term_gradients[term], strict=True)
                depends = any(not torch.equal(zero, usual) for zero, usual in pairs)
                left = max(_largest(gradient) for gradient in gradients)
                require(
                    not depends or left == 0,
                    got=f"{name}: term {term!r} depends on the advantages and has a gradient of "
                    f"{left:g} where they are all 0",
                    expected="0: nothing to learn from actions as good as expected",
                    likely="an offset or an entropy or KL part inside the policy term (give those "
                    "terms of their own)",
                )

        if not tried:
            pytest.skip("it reads no advantages")

    def test_gradients_are_finite_however_far_the_policy_has_moved(self, losses):
        """Log ratios of up to 2000 in size give a finite loss and finite gradients."""
        for name, loss, mini in self._cases(losses):
            for moved in MOVES:
                result = _in_one_piece(loss, mini.with_outputs_moved(moved))
                infinite = [
                    output
                    for output, gradients in result.gradients.items()
                    if not _all_finite(gradients)
                ]
                require(
                    np.isfinite(result.total) and not infinite,
                    got=f"{name}: loss {result.total}, gradients of {infinite} not finite, with "
                    f"logprobs moved by {moved:g}",
                    expected="finite numbers",
                    likely="exp of a log ratio that is not clamped to [-20, 20], a logarithm of 0, "
                    "or a division by 0",
                )

    def test_it_is_a_function_of_its_arguments(self, losses):
        """Two calls with equal rows give the same number, and no column is changed in place."""
        for name, loss, mini in self._cases(losses, 1):
            first = _in_one_piece(loss, mini)
            second = _in_one_piece(loss, mini)
            # Equal to the last bit.
            same = first.total == second.total
            require(
                same and not first.changed,
                got=f"{name}: {first.total} and then {second.total}; changed in place: "
                f"{sorted(first.changed) or 'nothing'}",
                expected="the same twice, and its batch as it was",
                likely="state is kept between calls (it goes to the algorithm, and into "
                "state_dict), or an in-place operation",
            )

    # --- what the tests share ---

    def _cases(
        self, losses: Mapping[str, Loss], trials: int | None = None
    ) -> Iterator[tuple[str, Loss, MiniBatch]]:
        """Yield (name for messages, loss, random mini-batch), `trials` of them for each loss."""
        for name, loss in losses.items():
            for seed in range(trials or self.trials):
                # The number of rows is a multiple of the unit's size.
                size = 1 if loss.unit == "row" else self.unit_size
                rows = self.rows - self.rows % size
                shape = RowShapes.random(rows, self.longest, size, loss.unit, seed)
                yield f"loss of {name}", loss, MiniBatch.make(loss, shape, self.columns)

    def _same(self, found: Result, whole: Result, what: str, likely: str) -> None:
        """Require that loss, gradients and metrics of `found` are those of `whole`."""
        room = self.tolerance * max(abs(whole.total), 1e-3)
        require(
            abs(found.total - whole.total) <= room,
            got=f"{what}: loss {found.total:.7g}",
            expected=f"{whole.total:.7g}, as for the mini-batch in one piece",
            likely=likely,
        )

        # Gradients are compared on the scale of the largest entry of all outputs.
        gradients = chain.from_iterable(whole.gradients.values())
        largest = max(_largest(gradient) for gradient in gradients if gradient.numel())
        for name, rows in whole.gradients.items():
            for row, gradient in enumerate(rows):
                require_close(
                    found.gradients[name][row],
                    gradient,
                    self.tolerance * max(largest, 1e-9),
                    what=f"{what}: gradient of {name}, row {row}",
                    likely=likely,
                )

        # A missing metric is nan, which no tolerance covers.
        for name, value in whole.metrics.items():
            distance = abs(found.metrics.get(name, np.nan) - value)
            require(
                distance <= self.tolerance * max(abs(value), 1e-3),
                got=f"{what}: metric {name} is {found.metrics.get(name)}",
                expected=f"{value}",
                likely=likely,
            )


def _in_one_piece(loss: Loss, mini: MiniBatch, extra: int = 0) -> Result:
    """Return the loss over one micro-batch with all rows, padded by `extra` more columns."""
    return evaluate(loss, mini, [mini.units_rows()], extra)


def _largest(gradient: torch.Tensor) -> float:
    """Return the largest entry in size; 0 of an empty tensor."""
    return float(gradient.abs().max()) if gradient.numel() else 0.0


def _largest_hidden_sum(gradients: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> float:
    """Return the largest sum over a row of |gradient| at masked tokens. Both have [T] per row."""
    rows = zip(gradients, masks, strict=True)
    return max(float(gradient[~mask].abs().sum()) for gradient, mask in rows)


def _all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether no gradient has an infinite or undefined entry."""
    return all(torch.isfinite(gradient).all() for gradient in gradients)
