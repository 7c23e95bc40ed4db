"""Requests that come while others run, and weights that change under them, where an engine says that it can."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, give_weights
from hybridflow.kit.testing.models import reference

LONG = 100
TRIES = 10


class EngineFlow(EngineBase):
    """For engines with `continuous`, and with `inflight`; skipped by others."""

    recomputes = False
    """Whether an update in flight drops keys and values that the old weights made, so that later tokens are the new
    model's own."""

    def test_requests_join_those_that_run(self, start):
        engine = self.speaking(start, next(self.references()))
        if not engine.continuous:
            pytest.skip("it takes requests by submit alone")
        asked = [self._request(at, length) for at, length in enumerate((LONG, 3, 5, LONG))]
        expected = {c.id: c.response_ids.tolist() for c in engine.generate(asked)}
        engine.add(asked[0])
        engine.add(asked[1])
        done = engine.step()
        for request in asked[2:]:
            engine.add(request)
        done += self._rest(engine, len(asked) - len(done))
        require(
            sorted(c.id for c in done) == [0, 1, 2, 3],
            got=f"completions of {[c.id for c in done]} for requests 0 to 3",
            expected="one of each",
            likely="a request that was added while others ran is lost, or answered twice",
        )
        for completion in done:
            require(
                completion.response_ids.tolist() == expected[completion.id],
                got=f"{completion.response_ids.tolist()} for request {completion.id}, added while others ran",
                expected=f"{expected[completion.id]}, as by submit",
                likely="the rows of requests are mixed up when one joins, or seeds follow slots",
            )

    def test_weights_may_change_while_sequences_run(self, start):
        for architecture in self.architectures:
            first, second = (
                reference(architecture, seed=seed, width=self.width) for seed in (0, 1)
            )
            engine = self.speaking(start, first, version=1)
            if not engine.inflight:
                pytest.skip("its weights change between sequences alone")
            done = self._changed_in_flight(engine, first, second)
            versions = np.asarray(done.weight_version)
            made = int((versions == 1).sum())
            require(
                versions.tolist() == [1] * made + [2] * (len(versions) - made)
                and 0 < made < len(versions),
                got=f"versions {versions.tolist()}",
                expected="first version 1, and from some token on version 2",
                likely="all tokens are stamped with one version, or the sequence was begun anew",
            )
            prompt, tokens = np.asarray(PROMPTS[1]), done.response_ids.tolist()
            require(
                tokens[:made] == first.greedy(prompt, made),
                got=f"{tokens[:made]}, said to be of version 1",
                expected=f"{first.greedy(prompt, made)}",
                likely="stamps are off, or the tokens of before were drawn again",
            )
            if self.recomputes:
                context = np.concatenate([prompt, done.response_ids[:made]])
                rest = second.greedy(context, len(tokens) - made)
                require(
                    tokens[made:] == rest,
                    got=f"{tokens[made:]}, said to be of version 2",
                    expected=f"{rest}, by the new weights after the tokens that were there",
                    likely="keys and values of the old weights stay in the cache (recomputes = False says so)",
                )

    def _changed_in_flight(self, engine: RolloutEngine, first, second) -> Completion:
        """One whose versions differ, if the engine gave one: a fast one may have ended before the update began."""
        for attempt in range(TRIES):
            if attempt:
                give_weights(engine, first.parameters, 1)
            stream = engine.submit(
                [self._request(0, LONG, 0.0), self._request(1, 2 + attempt, 0.0)]
            )
            done = [next(stream)]
            give_weights(engine, second.parameters, 2)
            done += list(stream)
            found = next(c for c in done if c.id == 0)
            if len(set(np.asarray(found.weight_version).tolist())) > 1:
                break
        return found

    def _request(self, at: int, tokens: int, temperature: float = 1.0) -> Request:
        return Request(
            at,
            np.asarray(PROMPTS[1]),
            SamplingParams(max_tokens=tokens, temperature=temperature),
            seed=at,
        )

    def _rest(self, engine: RolloutEngine, count: int) -> list[Completion]:
        done: list[Completion] = []
        for _ in range(1000 * LONG):
            if len(done) >= count:
                break
            done += engine.step()
        return done
