"""BackendOutputs: a training backend computes what Hugging Face's model computes.

The outputs of a row must not depend on the micro-batches that the rows are put into.
"""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.contracts.training import Packing
from hybridflow.kit.testing.backend_base import LENGTHS, TOKEN_OUTPUTS, BackendBase
from hybridflow.kit.testing.checks import require, require_close
from hybridflow.kit.testing.models import Reference, Sequences
from hybridflow.kit.testing.passes import Passes, memoryless

PLAN = ([4], [2, 0], [1], [3])
"""The rows of four micro-batches, in an order that differs from that of the rows."""


class BackendOutputs(BackendBase):
    """Tests of log-probabilities, entropy, top-k, values and scores."""

    def test_outputs_are_those_of_hugging_face(self, build):
        """Each row's outputs equal those of the reference on that row alone."""
        for ref in self.references():
            rows = Sequences.random(LENGTHS, seed=1)
            # Only a policy's outputs depend on the temperature.
            for temperature in (1.0, 0.6) if ref.spec.kind == "policy" else (1.0,):
                passes = Passes(build(ref.spec, None), rows, temperature=temperature)
                for name in TOKEN_OUTPUTS[ref.spec.kind]:
                    self._rows_are_those_of(ref, passes, name)

    def _rows_are_those_of(self, ref: Reference, passes: Passes, name: str) -> None:
        """Require that this output equals the reference's on each row."""
        outputs = passes.outputs([name])[name]
        for row, values in enumerate(outputs):
            require_close(
                values,
                passes.expected(ref, row)[name],
                self.tolerance,
                what=f"{name} of row {row} ({LENGTHS[row]} prompt and response tokens, temperature "
                f"{passes.temperature}), {self._name(ref)}",
                likely="outputs are off by one position (x[t] belongs to response token t, given "
                "what precedes it), the temperature is left out, padding is attended to, or "
                "positions do not start at 0",
            )

    def test_the_largest_logprobs_and_those_of_given_tokens_are_those_of_hugging_face(self, build):
        """topk_logprobs are those of the tokens in topk_ids, and topk:K are the K largest."""
        if not self.topk or "policy" not in self.kinds:
            pytest.skip("it gives no top-k")

        for ref in self.references("policy"):
            rows = Sequences.random(LENGTHS, seed=2)
            draw = torch.Generator().manual_seed(2)
            ids = [
                torch.randint(0, ref.spec.vocab_size, (len(response), 3), generator=draw)
                for response in rows.responses
            ]
            passes = Passes(build(ref.spec, None), rows, topk_ids=ids)

            # The first takes the tokens from the micro-batch, the second finds them itself.
            of_given = passes.outputs(["topk_logprobs"])["topk_logprobs"]
            of_largest = passes.outputs(["topk:3"])["topk_logprobs"]

            for row in range(len(rows)):
                log_p = passes.expected(ref, row)["log_softmax"]
                require_close(
                    of_given[row],
                    log_p.gather(-1, ids[row]),
                    self.tolerance,
                    what=f"topk_logprobs of row {row}",
                    likely="topk_ids [B, T, K] are not those of the same position",
                )
                require_close(
                    of_largest[row],
                    log_p.topk(3, -1).values,
                    self.tolerance,
                    what=f"topk:3 of row {row}",
                    likely="the K largest log-probabilities, in order, of the distribution that "
                    "made response token t",
                )

    def test_outputs_do_not_depend_on_the_micro_batches(self, build):
        """Rows in another order, with dummies between, have the outputs of one micro-batch."""
        for ref in self.references():
            rows = Sequences.random(LENGTHS, seed=3)
            passes = Passes(build(ref.spec, None), rows)
            names = list(TOKEN_OUTPUTS[ref.spec.kind])
            together = passes.outputs(names)
            apart = passes.outputs(names, plan=PLAN, dummies=2)

            for name in names:
                for row in range(len(rows)):
                    require_close(
                        apart[name][row],
                        together[name][row],
                        self.tolerance,
                        what=f"{name} of row {row} in other micro-batches, {self._name(ref)}",
                        likely="padding or the neighbouring rows leak into a row, or outputs come "
                        "in another order",
                    )

    def test_packed_rows_do_not_see_each_other(self, build):
        """A row's outputs are those of padded rows, and stay when its neighbours change."""
        for ref in self.references():
            backend = build(ref.spec, None)
            if backend.packing is Packing.PADDED:
                pytest.skip("it takes padded rows")
            rows = Sequences.random(LENGTHS, seed=8)
            changed = Sequences.random(LENGTHS, seed=9)
            for name in TOKEN_OUTPUTS[ref.spec.kind]:
                packed = Passes(backend, rows).outputs([name])[name]
                padded = Passes(backend, rows, packing=Packing.PADDED).outputs([name])[name]
                for row in range(len(rows)):
                    # All rows are others but this one.
                    prompts = list(changed.prompts)
                    responses = list(changed.responses)
                    prompts[row] = rows.prompts[row]
                    responses[row] = rows.responses[row]
                    others = Passes(backend, Sequences(prompts, responses)).outputs([name])[name]
                    for values, what in ((padded, "padded"), (others, "between other rows")):
                        self._is_apart(packed[row], values[row], f"{name} of row {row} {what}", ref)

    def test_rows_with_equal_prompts_have_the_outputs_of_rows_alone(self, build):
        """Shared prompts change nothing, for responses of any length, beside rows of their own."""
        for ref in self.references():
            backend = build(ref.spec, None)
            if backend.packing is not Packing.SHARED:
                pytest.skip("it shares no prompts")
            passes = Passes(backend, Sequences.with_equal_prompts(seed=10))
            for name in TOKEN_OUTPUTS[ref.spec.kind]:
                for row, values in enumerate(passes.outputs([name])[name]):
                    expected = passes.expected(ref, row)[name]
                    self._is_apart(values, expected, f"{name} of row {row} with its prompt", ref)

    def _is_apart(self, found, expected, what: str, ref: Reference) -> None:
        """Require that a packed row has the expected outputs."""
        require_close(
            found,
            expected,
            self.tolerance,
            what=f"{what}, {self._name(ref)}",
            likely="tokens see those of the row before theirs (MicroBatch.prompt_at, response_at), "
            "or positions do not start at 0 in each row",
        )

    def test_a_forward_keeps_no_graph_and_gives_float32(self, build):
        for ref in self.references():
            backend = build(ref.spec, memoryless() if self.trains else None)
            passes = Passes(backend, Sequences.random(LENGTHS, seed=4))
            outputs = passes.raw(TOKEN_OUTPUTS[ref.spec.kind])

            for name, values in outputs[0].items():
                require(
                    values.dtype == torch.float32 and not values.requires_grad,
                    got=f"{name} of dtype {values.dtype}, requires_grad {values.requires_grad}",
                    expected="float32 without a graph",
                    likely="forward runs outside torch.no_grad, or logits are not widened before "
                    "log_softmax",
                )
