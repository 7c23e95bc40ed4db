"""An engine answers every request once, ends where it was told to, and what else it may be able to do."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import Request, RolloutEngine, SamplingParams
from hybridflow.core.values.weights import Box
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, give_weights, requests
from hybridflow.kit.testing.models import VOCAB


class EngineRequests(EngineBase):
    """Ends, limits, prefixes, aborts, sleep."""

    def test_responses_end_at_the_limit_or_at_a_stop_token(self, start):
        for ref in self.references():
            engine = self.speaking(start, ref)
            for prompt in PROMPTS:
                plain = ref.greedy(np.asarray(prompt), 12)
                cut = plain[: plain.index(plain[5]) + 1]
                never = next(t for t in range(VOCAB) if t not in plain)
                stops = SamplingParams(
                    max_tokens=12, temperature=0.0, stop_token_ids=(never, plain[5])
                )
                self._ends(
                    engine,
                    prompt,
                    stops,
                    cut,
                    "stop",
                    "stop tokens end a response and are part of it",
                )
                going_on = attrs.evolve(stops, ignore_stop=True)
                self._ends(
                    engine, prompt, going_on, plain, "length", "ignore_stop goes on to max_tokens"
                )
                short = SamplingParams(max_tokens=3, temperature=0.0)
                self._ends(
                    engine, prompt, short, plain[:3], "length", "max_tokens counts response tokens"
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
        [done] = engine.generate(requests([prompt], sampling))
        require(
            done.response_ids.tolist() == expected and done.finish_reason == reason,
            got=f"{done.response_ids.tolist()}, finish_reason {done.finish_reason!r}, with {sampling}",
            expected=f"{expected}, finish_reason {reason!r}",
            likely=likely,
        )

    def test_a_stop_token_at_the_limit_is_a_stop(self, start):
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
        engine = self.speaking(start, next(self.references()))
        asked = []
        for at, request in enumerate(
            requests([PROMPTS[at % 4] for at in range(37)], SamplingParams())
        ):
            asked.append(
                attrs.evolve(
                    request, sampling=SamplingParams(max_tokens=1 + at % 9, stop_token_ids=(3, 4))
                )
            )
        answered = [c.id for c in engine.submit(asked)]
        require(
            sorted(answered) == sorted(r.id for r in asked),
            got=f"{len(answered)} completions, {len(set(answered))} ids, for {len(asked)} requests",
            expected="one completion for each request",
            likely="a request that ends in the same step as another, or is admitted late, is lost or yielded twice",
        )
        ordered = [c.id for c in engine.generate(asked)]
        require(
            ordered == [r.id for r in asked],
            got=f"generate gave ids {ordered[:5]}, ...",
            expected=f"the order of the requests: {[r.id for r in asked][:5]}, ...",
            likely="generate is overridden and returns completions as they finish",
        )

    def test_completions_have_one_entry_for_each_token(self, start):
        engine = self.speaking(start, next(self.references()))
        for done in self._run(engine, PROMPTS):
            kinds = [
                (np.asarray(a).dtype.name, len(a))
                for a in (done.response_ids, done.logprobs, done.weight_version)
            ]
            n = len(done.response_ids)
            require(
                kinds == [("int64", n), ("float32", n), ("int64", n)]
                and np.isfinite(done.logprobs).all(),
                got=f"response_ids, logprobs, weight_version as {kinds}",
                expected=f"int64, float32 and int64, each of length {n}, finite",
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

    # What it may be able to do
    def test_a_prefix_is_gone_on_from(self, start):
        if not self.prefixes:
            pytest.skip("it takes no prefixes")
        ref = next(self.references())
        engine = self.speaking(start, ref, version=5)
        plain = ref.greedy(np.asarray(PROMPTS[1]), 10)
        prefix = Request(
            1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=10, temperature=0.0), prefix_ids=np.asarray(plain[:4]),
            prefix_logprobs=np.full(4, -0.5, np.float32), prefix_versions=np.full(4, 2, np.int64),
        )  # fmt: skip
        [done] = engine.generate([prefix])
        good = done.response_ids.tolist() == plain and done.logprobs[:4].tolist() == [-0.5] * 4
        require(
            good and np.asarray(done.weight_version).tolist() == [2] * 4 + [5] * 6,
            got=f"{done.response_ids.tolist()}, logprobs {done.logprobs[:4].tolist()}, versions "
            f"{done.weight_version.tolist()}",
            expected=f"{plain}: the prefix with its own logprobs and versions, then new tokens; max_tokens counts both",
            likely="the prefix is treated as prompt, scored again, or comes twice",
        )

    def test_a_sampled_response_cut_and_gone_on_with_is_the_uncut_one(self, start):
        if not self.prefixes:
            pytest.skip("it takes no prefixes")
        engine = self.speaking(start, next(self.references()))
        [whole] = engine.generate(requests([PROMPTS[1]], SamplingParams(max_tokens=10)))
        [request] = requests([PROMPTS[1]], SamplingParams(max_tokens=10))
        rest = attrs.evolve(
            request, prefix_ids=whole.response_ids[:4], prefix_logprobs=whole.logprobs[:4],
            prefix_versions=np.asarray(whole.weight_version)[:4],
        )  # fmt: skip
        [done] = engine.generate([rest])
        require(
            done.response_ids.tolist() == whole.response_ids.tolist(),
            got=f"{done.response_ids.tolist()} when gone on from 4 tokens",
            expected=f"{whole.response_ids.tolist()}: numbers follow from (seed, position in the response)",
            likely="positions are counted from the end of the prefix",
        )

    def test_aborted_requests_are_answered_too(self, start):
        if not self.aborts:
            pytest.skip("it cannot abort")
        engine = self.speaking(start, next(self.references()))
        asked = requests(
            [PROMPTS[at % 4] for at in range(80)], SamplingParams(max_tokens=100)
        )  # some may wait
        asked[0] = attrs.evolve(asked[0], sampling=SamplingParams(max_tokens=1))
        stream = engine.submit(asked)
        done = [next(stream)]
        engine.abort()
        done += list(stream)
        reasons = {c.id: c.finish_reason for c in done}
        lengths = {len(c.response_ids) == len(c.logprobs) == len(c.weight_version) for c in done}
        require(
            len(done) == len(asked) and set(reasons) == {r.id for r in asked} and lengths == {True},
            got=f"{len(done)} completions of {len(asked)} requests after abort()",
            expected="one for each, with what was made so far",
            likely="aborted requests are dropped, or their arrays differ in length",
        )
        require(
            reasons[asked[0].id] == "length" and set(list(reasons.values())) == {"length", "abort"},
            got=f"finish reasons {sorted(reasons.values())}",
            expected='"length" for what had ended, "abort" for the rest',
            likely="abort does nothing, or reports another reason",
        )
        self._run(engine, PROMPTS)

    def test_lent_storage_needs_no_update_and_survives_sleep(self, start):
        """Skipped by an engine that lends nothing."""
        ref = next(self.references())
        expected = self._ids(self._run(self.speaking(start, ref), PROMPTS))
        engine = start(ref.spec)
        if not engine.lends:
            pytest.skip("it lends no storage")
        lent: dict[str, torch.Tensor] = {}
        for name, values in ref.parameters.items():
            view = engine.view(name, Box.full(values.shape))
            if view is not None:
                engine.lend(name)
                view.copy_(values)
                lent[name] = view
        engine.begin_update(1)
        for name, values in ref.parameters.items():
            if name not in lent:
                engine.receive(name, Box.full(values.shape), values)
        engine.end_update()
        first = self._ids(self._run(engine, PROMPTS))
        if self.sleeps:
            engine.sleep()
        kept = all(
            v.untyped_storage().nbytes() > 0 and torch.equal(v.cpu(), ref.parameters[n])
            for n, v in lent.items()
        )
        require(
            first == expected and kept,
            got=f"{'the expected' if first == expected else 'other'} tokens with lent storage, which "
            f"{'was kept' if kept else 'was lost'} over sleep",
            expected="the tokens of an engine that received everything, and the trainer's weights untouched",
            likely="lent parameters are waited for, or sleep drops storage that a trainer uses",
        )

    def test_it_speaks_again_after_sleep(self, start):
        if not self.sleeps:
            pytest.skip("it does not sleep")
        for ref in self.references():
            engine = self.speaking(start, ref)
            before = self._ids(self._run(engine, PROMPTS))
            engine.sleep()
            engine.wake()
            give_weights(engine, ref.parameters, 4)
            require(
                self._ids(self._run(engine, PROMPTS)) == before,
                got="other tokens after sleep, wake and an update with the same weights",
                expected="the same tokens",
                likely="wake does not restore what sleep gave up, or a cache still refers to it",
            )
