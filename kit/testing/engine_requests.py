"""EngineRequests: an engine answers every request once, and ends responses where it should.

Prefixes, aborts, lent storage and sleep are tested where the engine has them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import Request, RolloutEngine, SamplingParams
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, give_weights, requests
from hybridflow.kit.testing.models import VOCAB, Reference

TRIES = 3
"""Number of attempts to abort requests before they have ended."""


class EngineRequests(EngineBase):
    """Tests of ends, limits, prefixes, aborts and sleep."""

    def test_responses_end_at_the_limit_or_at_a_stop_token(self, start):
        """A response ends at max_tokens, or after a stop token unless ignore_stop is set."""
        for ref in self.references():
            engine = self.speaking(start, ref)
            for prompt in PROMPTS:
                # One stop token is the sixth greedy token, the other never comes.
                greedy = ref.greedy(np.asarray(prompt), 12)
                stop = greedy[5]
                until_stop = greedy[: greedy.index(stop) + 1]
                absent = next(token for token in range(VOCAB) if token not in greedy)
                stops = SamplingParams(
                    max_tokens=12, temperature=0.0, stop_token_ids=(absent, stop)
                )
                ignores = attrs.evolve(stops, ignore_stop=True)
                short = SamplingParams(max_tokens=3, temperature=0.0)

                self._ends(
                    engine,
                    prompt,
                    stops,
                    until_stop,
                    "stop",
                    "stop tokens end a response and are part of it",
                )
                self._ends(
                    engine,
                    prompt,
                    ignores,
                    greedy,
                    "length",
                    "ignore_stop goes on to max_tokens",
                )
                self._ends(
                    engine,
                    prompt,
                    short,
                    greedy[:3],
                    "length",
                    "max_tokens counts response tokens",
                )

    def _ends(
        self,
        engine: RolloutEngine,
        prompt,
        sampling: SamplingParams,
        expected: list[int],
        reason: str,
        likely: str,
    ) -> None:
        """Require these response tokens and this finish_reason."""
        [done] = engine.generate(requests([prompt], sampling))

        tokens = done.response_ids.tolist()
        require(
            tokens == expected and done.finish_reason == reason,
            got=f"{tokens}, finish_reason {done.finish_reason!r}, with {sampling}",
            expected=f"{expected}, finish_reason {reason!r}",
            likely=likely,
        )

    def test_a_stop_token_at_the_limit_is_a_stop(self, start):
        """finish_reason is "stop" where the last allowed token is a stop token."""
        ref = next(self.references())
        first = ref.greedy(np.asarray(PROMPTS[0]), 1)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, stop_token_ids=(first[0],))
        self._ends(
            self.speaking(start, ref),
            PROMPTS[0],
            sampling,
            first,
            "stop",
            "the stop token is looked for before the limit",
        )

    def test_every_request_is_answered_once(self, start):
        """37 requests of several lengths have one completion each, in order from `generate`."""
        engine = self.speaking(start, next(self.references()))

        # Lengths run from 1 to 9, so that some requests end in the same step.
        batch = []
        prompts = [PROMPTS[i % 4] for i in range(37)]
        for i, request in enumerate(requests(prompts, SamplingParams())):
            sampling = SamplingParams(max_tokens=1 + i % 9, stop_token_ids=(3, 4))
            batch.append(attrs.evolve(request, sampling=sampling))

        ids = [request.id for request in batch]
        answered = [completion.id for completion in engine.submit(batch)]
        require(
            sorted(answered) == sorted(ids),
            got=f"{len(answered)} completions, {len(set(answered))} ids, for {len(batch)} requests",
            expected="one completion for each request",
            likely="a request that ends in the same step as another, or is admitted late, is lost "
            "or yielded twice",
        )

        ordered = [completion.id for completion in engine.generate(batch)]
        require(
            ordered == ids,
            got=f"generate gave ids {ordered[:5]}, ...",
            expected=f"the order of the requests: {ids[:5]}, ...",
            likely="generate is overridden and returns completions as they finish",
        )

    def test_completions_have_one_entry_for_each_token(self, start):
        """response_ids, logprobs and weight_version have equal lengths and the right dtypes."""
        engine = self.speaking(start, next(self.references()))
        for done in self._run(engine, PROMPTS):
            arrays = (done.response_ids, done.logprobs, done.weight_version)
            kinds = [(np.asarray(array).dtype.name, len(array)) for array in arrays]
            length = len(done.response_ids)

            require(
                kinds == [("int64", length), ("float32", length), ("int64", length)]
                and np.isfinite(done.logprobs).all(),
                got=f"response_ids, logprobs, weight_version as {kinds}",
                expected=f"int64, float32 and int64, each of length {length}, finite",
                likely="arrays have other types or the length of a padded batch",
            )

    def test_no_requests_give_no_completions(self, start):
        engine = self.speaking(start, next(self.references()))
        require(
            list(engine.submit([])) == [],
            got="completions for no requests",
            expected="none: a rank without rows calls it so",
            likely="an empty batch is not handled",
        )

    # Abilities that a flag may leave out
    def test_a_prefix_is_gone_on_from(self, start):
        """A response continues its prefix, whose logprobs and versions stay as they were."""
        if not self.prefixes:
            pytest.skip("it takes no prefixes")

        ref = next(self.references())
        engine = self.speaking(start, ref, version=5)
        prompt = np.asarray(PROMPTS[1])
        greedy = ref.greedy(prompt, 10)
        request = Request(
            1,
            prompt,
            SamplingParams(max_tokens=10, temperature=0.0),
            prefix_ids=np.asarray(greedy[:4]),
            prefix_logprobs=np.full(4, -0.5, np.float32),
            prefix_versions=np.full(4, 2, np.int64),
        )

        # Logprobs and versions that no model gave show whether the prefix is scored again.
        [done] = engine.submit([request])
        tokens = done.response_ids.tolist()
        logprobs = done.logprobs[:4].tolist()
        versions = done.weight_version.tolist()
        require(
            tokens == greedy and logprobs == [-0.5] * 4 and versions == [2] * 4 + [5] * 6,
            got=f"{tokens}, logprobs {logprobs}, versions {versions}",
            expected=f"{greedy}: the prefix with its own logprobs and versions, then new tokens; "
            "max_tokens counts both",
            likely="the prefix is treated as prompt, scored again, or comes twice",
        )

    def test_a_sampled_response_cut_and_gone_on_with_is_the_uncut_one(self, start):
        """A request whose prefix is the first 4 sampled tokens gives the same response again."""
        if not self.prefixes:
            pytest.skip("it takes no prefixes")

        engine = self.speaking(start, next(self.references()))
        [request] = requests([PROMPTS[1]], SamplingParams(max_tokens=10))
        [uncut] = engine.generate([request])

        # Its tokens were sampled, so that a wrong position would draw others.
        rest = attrs.evolve(
            request,
            prefix_ids=uncut.response_ids[:4],
            prefix_logprobs=uncut.logprobs[:4],
            prefix_versions=np.asarray(uncut.weight_version)[:4],
        )
        [done] = engine.submit([rest])
        require(
            done.response_ids.tolist() == uncut.response_ids.tolist(),
            got=f"{done.response_ids.tolist()} when gone on from 4 tokens",
            expected=f"{uncut.response_ids.tolist()}: numbers follow from (seed, position in the "
            "response)",
            likely="positions are counted from the end of the prefix",
        )

    def test_aborted_requests_are_answered_too(self, start):
        """After abort() each request has a completion, with the tokens made so far."""
        if not self.aborts:
            pytest.skip("it cannot abort")

        engine = self.speaking(start, next(self.references()))

        # So many requests that some may still wait; the first is answered by the first step.
        prompts = [PROMPTS[i % 4] for i in range(80)]
        batch = requests(prompts, SamplingParams(max_tokens=100))
        batch[0] = attrs.evolve(batch[0], sampling=SamplingParams(max_tokens=1))

        # An engine in a process of its own may end all of them before it hears of the abort.
        for _ in range(TRIES):
            stream = engine.submit(batch)
            done = [next(stream)]
            engine.abort()
            done += list(stream)
            if any(completion.finish_reason == "abort" for completion in done):
                break

        # Finished and aborted completions alike have arrays of one entry per token.
        reasons = {completion.id: completion.finish_reason for completion in done}
        aligned = all(
            len(completion.response_ids)
            == len(completion.logprobs)
            == len(completion.weight_version)
            for completion in done
        )
        require(
            len(done) == len(batch)
            and set(reasons) == {request.id for request in batch}
            and aligned,
            got=f"{len(done)} completions of {len(batch)} requests after abort()",
            expected="one for each, with what was made so far",
            likely="aborted requests are dropped, or their arrays differ in length",
        )
        require(
            reasons[batch[0].id] == "length" and set(reasons.values()) == {"length", "abort"},
            got=f"finish reasons {sorted(reasons.values())}",
            expected='"length" for what had ended, "abort" for the rest',
            likely="abort does nothing, or reports another reason",
        )

        # The engine takes requests again.
        self._run(engine, PROMPTS)

    def test_lent_storage_needs_no_update_and_survives_sleep(self, start):
        """Weights in lent storage are used without `receive`, and sleep leaves them alone.

        An engine that lends no storage is skipped.
        """
        ref = next(self.references())
        expected = self._ids(self._run(self.speaking(start, ref), PROMPTS))
        engine = start(ref.spec)
        if not engine.lends:
            pytest.skip("it lends no storage")

        # The update brings only the parameters that the engine does not lend.
        lent = _lent_views(engine, ref)
        engine.begin_update(1)
        for name, values in ref.parameters.items():
            if name not in lent:
                engine.receive(name, Box.full(values.shape), values)
        engine.end_update()
        tokens = self._ids(self._run(engine, PROMPTS))
        if self.sleeps:
            engine.sleep()

        intact = _are_intact(lent, ref)
        require(
            tokens == expected and intact,
            got=f"{'the expected' if tokens == expected else 'other'} tokens with lent storage, "
            f"which {'was kept' if intact else 'was lost'} over sleep",
            expected="the tokens of an engine that received everything, and the trainer's weights "
            "untouched",
            likely="lent parameters are waited for, or sleep drops storage that a trainer uses",
        )

    def test_it_speaks_again_after_sleep(self, start):
        """After sleep, wake and an update the engine gives the same tokens as before."""
        if not self.sleeps:
            pytest.skip("it does not sleep")

        for ref in self.references():
            engine = self.speaking(start, ref)
            before = self._ids(self._run(engine, PROMPTS))

            # Sleep may give up the weights: an update brings them back. A sync wakes no cache.
            engine.sleep()
            engine.wake(cache=False)
            give_weights(engine, ref.parameters, 4)
            engine.wake()
            require(
                self._ids(self._run(engine, PROMPTS)) == before,
                got="other tokens after sleep, wake and an update with the same weights",
                expected="the same tokens",
                likely="wake does not restore what sleep gave up, or a cache still refers to it",
            )


def _lent_views(engine: RolloutEngine, ref: Reference) -> dict[str, torch.Tensor]:
    """Borrow all parameters that the engine lends, write the weights, and return the views."""
    lent: dict[str, torch.Tensor] = {}
    for name, values in ref.parameters.items():
        view = engine.view(name, Box.full(values.shape))
        if view is not None:
            engine.lend(name)
            view.copy_(values)
            lent[name] = view
    return lent


def _are_intact(views: Mapping[str, torch.Tensor], ref: Reference) -> bool:
    """Return whether the views still have storage, and the reference's weights in it."""
    for name, view in views.items():
        # A tensor whose storage was freed cannot be read.
        if view.untyped_storage().nbytes() == 0:
            return False
        if not torch.equal(view.cpu(), ref.parameters[name]):
            return False
    return True
