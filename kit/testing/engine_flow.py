"""EngineFlow: requests that join running ones, and weights that change while sequences run.

Updates in flight are tested of engines that declare them (`inflight`).
"""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, give_weights
from hybridflow.kit.testing.models import Reference, reference

LONG = 100
"""Number of response tokens of a sequence that still runs when something changes."""
TRIES = 10
"""Number of attempts to change the weights before a long sequence has ended."""


class EngineFlow(EngineBase):
    """Tests of `add` and `step` beside running requests, and of updates in flight."""

    recomputes = False
    """Whether an update in flight drops the keys and values that the old weights made.

    If so, later tokens depend on the new weights alone.
    """

    def test_requests_join_those_that_run(self, start):
        """Requests added between steps are answered once, with the tokens that `submit` gives."""
        engine = self.speaking(start, next(self.references()))
        lengths = (LONG, 3, 5, LONG)
        batch = [self._request(i, length) for i, length in enumerate(lengths)]
        expected = {c.id: c.response_ids.tolist() for c in engine.generate(batch)}

        # Two requests begin, and the other two join them after a step.
        engine.add(batch[0])
        engine.add(batch[1])
        done = engine.step()
        for request in batch[2:]:
            engine.add(request)
        done += self._rest(engine, len(batch) - len(done))

        require(
            sorted(completion.id for completion in done) == [0, 1, 2, 3],
            got=f"completions of {[completion.id for completion in done]} for requests 0 to 3",
            expected="one of each",
            likely="a request that was added while others ran is lost, or answered twice",
        )
        for completion in done:
            tokens = completion.response_ids.tolist()
            require(
                tokens == expected[completion.id],
                got=f"{tokens} for request {completion.id}, added while others ran",
                expected=f"{expected[completion.id]}, as by submit",
                likely="the rows of requests are mixed up when one joins, or seeds follow slots",
            )

    def test_what_a_request_has_made_so_far_is_part_of_its_completion(self, start):
        """The tokens of `partial` are the first ones of the completion, whenever it is asked."""
        engine = self.speaking(start, next(self.references()))
        # Asked before each step, until it is over
        engine.add(self._request(0, LONG))
        parts: list[list[int]] = []
        done: list[Completion] = []
        for _ in range(1000 * LONG):
            if done:
                break
            part = engine.partial(0)
            if part is None:
                self._rest(engine, 1)
                pytest.skip("it says nothing of requests before they have ended")
            parts.append(part.tolist())
            done = engine.step()

        tokens = done[0].response_ids.tolist()
        for part_tokens in parts:
            require(
                part_tokens == tokens[: len(part_tokens)],
                got=f"{part_tokens}, said while it ran",
                expected=f"the first of {tokens}",
                likely="the tokens are another request's, or a slot's that had one before",
            )

    def test_weights_may_change_while_sequences_run(self, start):
        """A sequence goes on over an update, and each token's stamp is right.

        Tokens of the old version are those of the old model; where the engine `recomputes`, the
        others are those of the new model after them.
        """
        for architecture in self.architectures:
            first = reference(architecture, seed=0, width=self.width)
            second = reference(architecture, seed=1, width=self.width)
            engine = self.speaking(start, first, version=1)
            if not engine.inflight:
                pytest.skip("its weights change between sequences alone")

            done = self._changed_in_flight(engine, first, second)

            # Versions do not go back: `old` tokens of version 1 come before all others.
            versions = np.asarray(done.weight_version)
            old = int((versions == 1).sum())
            require(
                versions.tolist() == [1] * old + [2] * (len(versions) - old)
                and 0 < old < len(versions),
                got=f"versions {versions.tolist()}",
                expected="first version 1, and from some token on version 2",
                likely="all tokens are stamped with one version, or the sequence was begun anew",
            )

            prompt = np.asarray(PROMPTS[1])
            tokens = done.response_ids.tolist()
            expected = first.greedy(prompt, old)
            require(
                tokens[:old] == expected,
                got=f"{tokens[:old]}, said to be of version 1",
                expected=f"{expected}",
                likely="stamps are off, or the tokens of before were drawn again",
            )
            if self.recomputes:
                context = np.concatenate([prompt, done.response_ids[:old]])
                rest = second.greedy(context, len(tokens) - old)
                require(
                    tokens[old:] == rest,
                    got=f"{tokens[old:]}, said to be of version 2",
                    expected=f"{rest}, by the new weights after the tokens that were there",
                    likely="keys and values of the old weights stay in the cache (recomputes = "
                    "False says so)",
                )

    def _changed_in_flight(
        self, engine: RolloutEngine, first: Reference, second: Reference
    ) -> Completion:
        """Return a long greedy completion during which version 2 replaced version 1.

        A fast engine may end the sequence before the update begins: then its last attempt, of one
        version, is returned.
        """
        for attempt in range(TRIES):
            if attempt:
                give_weights(engine, first.parameters, 1)

            # The update begins when the short request is answered, later in each attempt.
            long = self._request(0, LONG, 0.0)
            short = self._request(1, 2 + attempt, 0.0)
            stream = engine.submit([long, short])
            done = [next(stream)]
            give_weights(engine, second.parameters, 2)
            done += list(stream)

            completion = next(c for c in done if c.id == 0)
            if len(set(np.asarray(completion.weight_version).tolist())) > 1:
                break
        return completion

    def _request(self, at: int, tokens: int, temperature: float = 1.0) -> Request:
        """Return request number `at`, which is its seed too, of a response of `tokens` tokens."""
        sampling = SamplingParams(max_tokens=tokens, temperature=temperature)
        return Request(at, np.asarray(PROMPTS[1]), sampling, seed=at)

    def _rest(self, engine: RolloutEngine, count: int) -> list[Completion]:
        """Step until `count` more requests are answered, or it is clear that they never will."""
        done: list[Completion] = []
        for _ in range(1000 * LONG):
            if len(done) >= count:
                break
            done += engine.step()
        return done
