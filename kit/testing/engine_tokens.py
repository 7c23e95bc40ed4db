"""EngineTokens: an engine's tokens and logprobs are the model's, with the weights it was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import Completion, RolloutEngine
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.checksum import checksum, totals
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing.checks import require, require_raises
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, give_weights
from hybridflow.kit.testing.models import Reference, reference

Sent = tuple[str, Box, torch.Tensor]
"""A box of a parameter, as an update brings it."""


class EngineTokens(EngineBase):
    """Tests of tokens, logprobs, updates of the weights, and their layout."""

    def test_greedy_tokens_are_those_of_hugging_face(self, start):
        """At temperature 0 the engine gives what Hugging Face's generate gives."""
        for ref in self.references():
            engine = self.speaking(start, ref)
            completions = self._run(engine, PROMPTS, temperature=0.0)
            for done, prompt in zip(completions, PROMPTS, strict=True):
                expected = ref.greedy(np.asarray(prompt), 12)
                require(
                    done.response_ids.tolist() == expected,
                    got=f"greedy tokens {done.response_ids.tolist()} after {prompt}, "
                    f"{ref.spec.hf_config['model_type']}",
                    expected=f"{expected}, from Hugging Face's generate",
                    likely="positions, the causal mask or the KV cache are wrong, weights are "
                    "stale or converted wrongly, or temperature 0 samples",
                )

    def test_logprobs_are_those_of_a_forward_over_the_whole_sequence(self, start):
        """They agree with the reference, which has no KV cache, at several temperatures."""
        for ref in self.references():
            engine = self.speaking(start, ref)
            for temperature in (1.0, 0.7, 0.0):
                completions = self._run(engine, PROMPTS, temperature=temperature)
                # Logprobs of greedy tokens are of the logits as they are.
                self._all_logprobs(ref, completions, temperature or 1.0)

    def test_logprobs_are_those_before_filters(self, start):
        """They are of the whole distribution: what a filter removes is not renormalised away."""
        if not self.filters:
            pytest.skip("it has no top_k, top_p and min_p")

        ref = next(self.references())
        filters = (dict(top_k=3), dict(top_p=0.5), dict(min_p=0.3))
        for chosen in filters:
            completions = self._run(self.speaking(start, ref), PROMPTS, **chosen)
            self._all_logprobs(
                ref,
                completions,
                1.0,
                "they are renormalised over what top_k, top_p and min_p leave",
            )

    def test_logprobs_are_those_before_biases(self, start):
        """They are of the model's own logits, as a trainer computes them."""
        if not self.biases:
            pytest.skip("it has no logit_bias")

        ref = next(self.references())
        engine = self.speaking(start, ref)

        # Some tokens are forbidden by a bias so large that a float32 logit is lost in the sum.
        bias = dict.fromkeys(range(10), -1e9)
        bias |= {17: -100.0, 30: 4.0}
        for temperature in (0.7, 0.0):
            completions = self._run(engine, PROMPTS, temperature=temperature, logit_bias=bias)
            self._all_logprobs(
                ref,
                completions,
                temperature or 1.0,
                "they are of the logits with the biases added, or biases are taken off again: 1e9 "
                "leaves nothing of a float32 logit",
            )

    # --- updates of the weights ---

    def test_after_an_update_the_new_weights_speak(self, start):
        """Tokens and logprobs are those of the second update's weights alone."""
        for architecture in self.architectures:
            first = reference(architecture, seed=0, width=self.width)
            second = reference(architecture, seed=1, width=self.width)
            engine = self.speaking(start, first, version=1)
            # The engine generates once with the first weights, so that its caches are filled.
            self._run(engine, PROMPTS, temperature=0.0)

            give_weights(engine, second.parameters, version=2)
            completions = self._run(engine, PROMPTS, temperature=0.0)
            for done, prompt in zip(completions, PROMPTS, strict=True):
                require(
                    done.response_ids.tolist() == second.greedy(np.asarray(prompt), 12),
                    got=f"greedy tokens {done.response_ids.tolist()} after {list(prompt)}",
                    expected="what the weights of the second update say",
                    likely="a cache survives the update (prefix cache, fused or captured weights, "
                    "a tied head's own copy)",
                )
                self._logprobs(second, prompt, done, 1.0)

    def test_parts_of_a_parameter_make_up_the_whole(self, start):
        """Parameters that arrive in three boxes each are put together correctly."""
        if not self.boxes:
            pytest.skip("it takes whole parameters alone")

        for ref in self.references():
            engine = start(ref.spec)
            give_weights(engine, ref.parameters, 1, pieces=3)
            completions = self._run(engine, PROMPTS, temperature=0.0)
            self._all_logprobs(
                ref,
                completions,
                1.0,
                "a box is written to the wrong place of a fused or sharded parameter",
            )

    def test_it_refuses_before_it_has_weights(self, start):
        """Generating before the first update raises a HybridFlowError."""
        engine = start(next(self.references()).spec)
        self._refuses(
            engine, "without weights", "call check_ready() in submit: fresh storage holds anything"
        )

    def test_it_refuses_during_an_update(self, start):
        """Generating in an open update raises; after end_update the engine generates."""
        ref = next(self.references())
        engine = self.speaking(start, ref)
        other = reference(ref.spec.hf_config["model_type"], seed=1, width=self.width)
        give_weights(engine, other.parameters, 4, end=False)
        self._refuses(
            engine,
            "between begin_update and end_update",
            "call check_ready() in submit: weights are mixed now",
        )

        engine.end_update()
        self._run(engine, PROMPTS)

    def test_a_first_update_that_lacks_a_parameter_is_refused(self, start):
        """Its end raises a HybridFlowError; the engine then has no weights."""
        ref = next(self.references())
        engine = start(ref.spec)
        self._refuses_update(engine, ref, 1, self._but_the_last(engine, ref), "lacks a parameter")

    def test_every_later_update_brings_each_element_once(self, start):
        """One that lacks a parameter, or half of one, or has one twice, ends in a HybridFlowError.

        The engine keeps its version and refuses to generate until a whole update has come.
        """
        ref = next(self.references())
        engine = self.speaking(start, ref, version=1)
        whole = self._but_the_last(engine, ref)
        name = list(engine.layout().params)[-1]
        values = ref.parameters[name]
        full = Box.full(values.shape)
        half = Box(full.start, (full.stop[0] // 2, *full.stop[1:]))

        last = (name, full, values)
        wrong = {
            "lacks a parameter": whole,
            "brings a parameter twice": [*whole, last, last],
        }
        if self.boxes:
            part = (name, half, values[half.slices()])
            wrong["brings half of a parameter"] = [*whole, part]
            wrong["brings one half twice"] = [*whole, part, part]
        for what, boxes in wrong.items():
            self._refuses_update(engine, ref, 2, boxes, what)
            require(
                engine.version == 1,
                got=f"version {engine.version} after an update to 2 that {what}",
                expected="1, that of the last whole update",
                likely="end_update sets the version before it checks what has come",
            )
        give_weights(engine, ref.parameters, 3)
        self._run(engine, PROMPTS)

    @staticmethod
    def _but_the_last(engine: RolloutEngine, ref: Reference) -> list[Sent]:
        """Return all parameters but the last, as an update brings them."""
        names = list(engine.layout().params)[:-1]
        return [
            (name, Box.full(ref.parameters[name].shape), ref.parameters[name]) for name in names
        ]

    def _refuses_update(
        self, engine: RolloutEngine, ref: Reference, version: int, boxes: list[Sent], what: str
    ) -> None:
        """Require that an update of these boxes raises, and generating after it too."""

        def update() -> None:
            engine.begin_update(version)
            for name, box, values in boxes:
                engine.receive(name, box, values)
            engine.end_update()

        require_raises(
            update,
            HybridFlowError,
            what=f"an update that {what}",
            likely="elements are not counted (hybridflow.kit.arrivals.Arrivals does): what is "
            "missing stays what it was, and the engine speaks with other weights",
        )
        self._refuses(engine, f"after an update that {what}", "call check_ready() in submit")

    def test_every_token_carries_the_version_of_its_weights(self, start):
        """weight_version and engine.version are the number that begin_update was given."""
        engine = self.speaking(start, next(self.references()), version=7)
        for done in self._run(engine, PROMPTS):
            versions = np.asarray(done.weight_version).tolist()
            require(
                versions == [7] * len(done.response_ids) and engine.version == 7,
                got=f"weight_version {versions}, engine.version {engine.version}",
                expected="7, as begin_update said, for each token",
                likely="versions are counted by the engine instead of taken from begin_update",
            )

    def test_a_proof_tells_what_an_update_has_brought(self, start):
        """`proof` has checksums of the values that were sent, and finds the one that was not."""
        if not self.proofs:
            pytest.skip("it proves nothing")

        for version, ref in enumerate(self._two_of_one_model(), 1):
            if version == 1:
                engine = start(ref.spec)
            expected = self._begin_proof(engine, ref, version)
            *names, lost = expected
            for name in (*names, lost):
                if name == lost:
                    require(
                        engine.proof()[lost][0] != version,
                        got=f"proof() says that version {version} brought {lost}",
                        expected="another version, or None: nothing of it was received",
                        likely="`written` answers for the update, not for the parameter",
                    )
                values = ref.parameters[name]
                engine.receive(name, Box.full(values.shape), values)
            proof = dict(engine.proof())
            wrong = sorted(name for name in expected if proof.get(name) != expected[name])
            require(
                not wrong,
                got=f"{[(name, proof.get(name)) for name in wrong[:3]]}",
                expected=f"{[(name, expected[name]) for name in wrong[:3]]}, the version and the "
                "checksums of what was received",
                likely="`read` gives other values, or a copy from before the update",
            )
            engine.end_update()

    def _two_of_one_model(self) -> list[Reference]:
        """Return references of one architecture with different weights."""
        architecture = self.architectures[0]
        return [reference(architecture, seed=seed, width=self.width) for seed in (0, 1)]

    def _begin_proof(
        self, engine: RolloutEngine, ref: Reference, version: int
    ) -> dict[str, tuple[int, int]]:
        """Begin an update that is proven; return what the proof must say of each parameter."""
        layout = engine.layout()
        engine.begin_update(version)
        wanted = {}
        sums = []
        for name, boxes in layout.held[0].items():
            dtype = layout.params[name].dtype
            wanted[name] = (dtype, tuple(boxes))
            for box in boxes:
                sums.append((name, checksum(ref.parameters[name][box.slices()].to(dtype), box)))
        engine.expect(wanted)
        return {name: (version, value) for name, value in totals(sums).items()}

    def test_the_layout_has_the_canonical_names_and_shapes(self, start):
        """layout().params lists the parameters of the model's safetensors, with their shapes."""
        for ref in self.references():
            layout = start(ref.spec).layout()
            expected = {name: tuple(values.shape) for name, values in ref.parameters.items()}
            shapes = {name: tuple(param.shape) for name, param in layout.params.items()}
            names = {*shapes, *expected}
            differing = sorted(n for n in names if shapes.get(n) != expected.get(n))

            require(
                not differing,
                got=f"layout().params differs at {[(n, shapes.get(n)) for n in differing[:3]]}",
                expected=f"{[(n, expected.get(n)) for n in differing[:3]]}, as in the safetensors",
                likely="the engine's own (fused, padded or prefixed) names; tied parameters are "
                "listed once, and in ties",
            )

    def _all_logprobs(
        self, ref: Reference, completions: list[Completion], temperature: float, more: str = ""
    ) -> None:
        """Require of the completions of PROMPTS what `_logprobs` requires of one."""
        for done, prompt in zip(completions, PROMPTS, strict=True):
            self._logprobs(ref, prompt, done, temperature, more)

    def _refuses(self, engine: RolloutEngine, when: str, likely: str) -> None:
        """Require that generating raises a HybridFlowError now."""
        require_raises(
            lambda: self._run(engine, PROMPTS),
            HybridFlowError,
            what=f"generating {when}",
            likely=likely,
        )
