"""LossConformance: padding, the mask and the split change nothing; what is read is declared; gradients are finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.kit.testing.checks import missing_fixture, require, require_close
from hybridflow.kit.testing.minibatch import MiniBatch, Result, Undeclared, evaluate
from hybridflow.kit.testing.random_columns import Shape, standard_column

NOT_READ = "masked tokens"


class LossConformance:
    """Give a fixture `loss`: your Loss (or override `losses`: role -> Loss).

    Mini-batches are random and ragged, made of what the loss reads and needs. Override `columns` for columns that the
    kit does not know, or whose range your loss depends on.
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
    """Relative, of the loss, its metrics and its gradients."""
    uses_all_it_reads = True
    """Whether every declared column and output must be used on each call."""

    @pytest.fixture
    def loss(self) -> Loss:
        return missing_fixture(self, "loss", "an instance of your Loss")

    @pytest.fixture
    def losses(self, loss) -> Mapping[str, Loss]:
        return {type(loss).__name__: loss}

    def columns(self, name: str, shape: Shape) -> Any:
        """Column `name`: shape.per_token(...), shape.per_row(...), a tensor [rows] or a list of objects."""
        return standard_column(name, shape)

    # Invariants
    def test_the_split_into_micro_batches_and_ranks_changes_nothing(self, losses):
        for name, loss, mini in self._cases(losses):
            whole = evaluate(loss, mini, [mini.units_rows()])
            for plan in mini.plans():
                self._same(
                    evaluate(loss, mini, plan),
                    whole,
                    f"{name}: over {len(plan)} micro-batches",
                    "a local mean (value.mean(), or a division by the micro-batch's mask.sum()): return [B, T] values "
                    "in a Term "
                    "and let the core divide by the counts of the mini-batch. Or the loss looks at several rows "
                    "together: "
                    'then declare unit = "pair" or "group"',
                )

    def test_padding_changes_nothing(self, losses):
        for name, loss, mini in self._cases(losses):
            whole = evaluate(loss, mini, [mini.units_rows()])
            self._same(
                evaluate(loss, mini, [mini.units_rows()], extra=5),
                whole,
                f"{name}: with five columns of padding more",
                "a mean or a sum over all of [B, T], padding included; let the Term's mask (by default loss_mask) "
                "decide what counts",
            )

    def test_what_the_mask_hides_changes_nothing(self, losses):
        for name, loss, mini in self._cases(losses):
            clean = evaluate(loss, mini, [mini.units_rows()])
            for garbage, in_columns in ((-3e3, 3e3), (7.0, -7.0), (2e4, float("nan"))):
                found = evaluate(loss, mini.with_garbage(garbage, in_columns), [mini.units_rows()])
                self._same(
                    found,
                    clean,
                    f"{name}: with {garbage:g} under the zeros of loss_mask",
                    "tokens that the policy did not produce (tool output, padding) count: use batch['loss_mask'] in "
                    "every sum "
                    "over tokens, as the Term's mask or inside the loss",
                )
                for output, rows in found.gradients.items():
                    if output == "scores":
                        continue
                    leaked = max(
                        float(g[~m].abs().sum()) for g, m in zip(rows, mini.masks, strict=True)
                    )
                    require(
                        leaked == 0,
                        got=f"{name}: a gradient of {leaked:g} to outputs[{output!r}] of {NOT_READ}",
                        expected="exactly 0",
                        likely="the mask is applied to the value and not to what it is computed from, or by adding "
                        "instead of multiplying",
                    )

    def test_only_declared_columns_are_read(self, losses):
        for name, loss, mini in self._cases(losses, 1):
            try:
                result = evaluate(loss, mini, [mini.units_rows()])
            except Undeclared as error:
                require(
                    False,
                    got=f"{name} asks for {error.what}, which it does not declare",
                    expected=f"reads {list(loss.reads)} and needs {list(loss.needs)} to name everything",
                    likely=f"add it to `{error.field}` of {type(loss).__name__}: only declared columns travel to the "
                    "ranks",
                )
            if self.uses_all_it_reads:
                unused = sorted(({*loss.reads} - result.read) | ({*loss.needs} - result.needed))
                require(
                    not unused,
                    got=f"{name} declares {unused} and does not use them",
                    expected="columns that are read: each one travels to every rank in every mini-batch",
                    likely="drop them from reads or needs, under the settings that do not use them",
                )

    def test_zero_advantages_give_no_policy_gradient(self, losses):
        tried = False
        for name, loss, mini in self._cases(losses):
            if "advantages" not in loss.reads:
                continue
            tried = True
            nothing = evaluate(
                loss, mini.with_column("advantages", lambda values: values * 0), [mini.units_rows()]
            )
            some = evaluate(loss, mini, [mini.units_rows()])
            for term, gradients in nothing.term_gradients.items():
                depends = any(
                    not torch.equal(a, b)
                    for a, b in zip(gradients, some.term_gradients[term], strict=True)
                )
                left = max(float(g.abs().max()) if g.numel() else 0.0 for g in gradients)
                require(
                    not depends or left == 0,
                    got=f"{name}: term {term!r} depends on the advantages and has a gradient of {left:g} where they "
                    "are all 0",
                    expected="0: nothing to learn from actions as good as expected",
                    likely="an offset or an entropy or KL part inside the policy term (give those terms of their own)",
                )
        if not tried:
            pytest.skip("it reads no advantages")

    def test_gradients_are_finite_however_far_the_policy_has_moved(self, losses):
        for name, loss, mini in self._cases(losses):
            for moved in (0.0, 60.0, -60.0, 2000.0, -2000.0):
                result = evaluate(loss, mini.with_outputs_moved(moved), [mini.units_rows()])
                bad = [
                    o
                    for o, rows in result.gradients.items()
                    if not all(torch.isfinite(g).all() for g in rows)
                ]
                require(
                    np.isfinite(result.total) and not bad,
                    got=f"{name}: loss {result.total}, gradients of {bad} not finite, with logprobs moved by {moved:g}",
                    expected="finite numbers",
                    likely="exp of a log ratio that is not clamped to [-20, 20], a logarithm of 0, or a division by 0",
                )

    def test_it_is_a_function_of_its_arguments(self, losses):
        for name, loss, mini in self._cases(losses, 1):
            first, second = (evaluate(loss, mini, [mini.units_rows()]) for _ in range(2))
            same = first.total == second.total
            require(
                same and not first.changed,
                got=f"{name}: {first.total} and then {second.total}; changed in place: "
                f"{sorted(first.changed) or 'nothing'}",
                expected="the same twice, and its batch as it was",
                likely="state is kept between calls (it goes to the algorithm, and into state_dict), or an in-place "
                "operation",
            )

    # What the tests share
    def _cases(
        self, losses: Mapping[str, Loss], trials: int | None = None
    ) -> Iterator[tuple[str, Loss, MiniBatch]]:
        for name, loss in losses.items():
            for seed in range(trials or self.trials):
                size = 1 if loss.unit == "row" else self.unit_size
                shape = Shape.random(
                    self.rows - self.rows % size, self.longest, size, loss.unit, seed
                )
                yield f"loss of {name}", loss, MiniBatch.make(loss, shape, self.columns)

    def _same(self, found: Result, whole: Result, what: str, likely: str) -> None:
        room = self.tolerance * max(abs(whole.total), 1e-3)
        require(
            abs(found.total - whole.total) <= room,
            got=f"{what}: loss {found.total:.7g}",
            expected=f"{whole.total:.7g}, as for the mini-batch in one piece",
            likely=likely,
        )
        largest = max(
            float(g.abs().max()) for rows in whole.gradients.values() for g in rows if g.numel()
        )
        for name, rows in whole.gradients.items():
            for row, gradient in enumerate(rows):
                require_close(
                    found.gradients[name][row],
                    gradient,
                    self.tolerance * max(largest, 1e-9),
                    what=f"{what}: gradient of {name}, row {row}",
                    likely=likely,
                )
        for name, value in whole.metrics.items():
            require(
                abs(found.metrics.get(name, np.nan) - value)
                <= self.tolerance * max(abs(value), 1e-3),
                got=f"{what}: metric {name} is {found.metrics.get(name)}",
                expected=f"{value}",
                likely=likely,
            )
