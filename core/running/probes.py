"""Probe rows: proof that engines have the trained weights, where steps are generated ahead.

Tokens of a step that was generated ahead are of older weights, so its update cannot compare the
logprobs of engine and trainer. Instead each time that engines got weights, they generate some rows
with them, and the trainer scores these before its next optimizer step.
"""

from __future__ import annotations

from math import inf

import attrs
import numpy as np
import torch

from hybridflow.core.errors import MismatchError
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics

TOKENS = 64
"""The least number of tokens of a probe."""
LONGEST = 16
"""The most tokens of a probe's row: engines make one after the other."""


class Probes:
    """The probes of a run."""

    def __init__(self, run: Run):
        self.run = run
        self._rows: dict[str, Batch] = {}
        """Role -> the prompts of its probes."""

    def compare(self, name: str, rollout: SeparateRollout) -> Metrics:
        """Compare the logprobs of engines and trainer, of tokens that the engines make now.

        Return mismatch_mean, mismatch_kl and mismatch_max_ratio as updates do (gradients.py), named
        after the role. Raises MismatchError where the mean is above run.mismatch_stop. Nothing is
        compared where that is inf.
        """
        run = self.run
        limit = run.job.models[name].spec.mismatch_stop
        if limit == inf:
            return Metrics()
        longest = max(min(run.ctx.sampling.max_tokens, LONGEST), 1)
        sampling = attrs.evolve(run.ctx.sampling, max_tokens=longest, ignore_stop=True)
        if name not in self._rows:
            # Every replica has at least one row.
            layout = rollout.engines.generation
            assert layout is not None
            self._rows[name] = self._prompts(max(-(-TOKENS // longest), len(layout.replicas)))

        # The step is the seed, so that each probe has other tokens.
        rows = self._rows[name]
        rows = rows.join(rollout.engines.generate(rows, sampling, run.step))
        scored = run.ctx.roles[name].group.logprobs(rows, {"logprobs": "logprobs"})
        ours = torch.as_tensor(scored["logprobs"].values).double()
        d = (ours - torch.as_tensor(rows["rollout_logprobs"].values).double()).numpy()
        tokens = len(d)
        mean = float(np.abs(d).mean())
        if not mean <= limit:  # false for a NaN too
            raise MismatchError(
                "logprobs of the rollout engine and of the trainer, of "
                f"{tokens} tokens made by the weights after step {run.step}, differ by "
                f"{mean:.3g} nats on average, more than run.mismatch_stop = {limit:g}",
                role=name,
                phase="probe",
                rank=None,
            )
        figures = {
            f"{name}/mismatch_mean": (np.abs(d).sum(), tokens),
            f"{name}/mismatch_kl": ((np.exp(d) - 1 - d).sum(), tokens),
        }
        return Metrics(figures, {f"{name}/mismatch_max_ratio": np.exp(np.abs(d)).max()})

    def _prompts(self, count: int) -> Batch:
        """Return the first `count` prompts of the training data, again and again if they are fewer.

        The data's sampler does not advance.
        """
        total = min(count, self.run.session.prepared.rows["train"])
        rows = self.run.session.rows("train", 0, total).take(np.arange(count) % total)
        return rows.with_columns(sample_id=torch.arange(count, dtype=torch.int32))
