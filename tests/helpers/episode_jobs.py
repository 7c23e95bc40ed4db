"""What the ranks of an engine run in the tests of episodes."""

from __future__ import annotations

import numpy as np
import torch

from helpers.episodes import Echo, echoing
from helpers.sources import char
from helpers.training_jobs import Setup, make_worker, said_by
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.workers.episode_runner import run_episodes


class Silent:
    """A tokenizer that cannot say what a prompt is."""

    def encode(self, text: str) -> np.ndarray:
        return char().encode(text)

    def decode(self, ids) -> str:
        raise RuntimeError("no text")


def on_two_ranks(
    rank: int, world: int, setup: Setup
) -> tuple[list[list[int]], list[float], int, list[str]]:
    """Of one engine on all ranks: responses, returns, environments that this rank opened, and what failures say."""
    worker = make_worker(rank, setup)
    worker.sync()
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(2,), logit_bias={14: 4.0})
    requests = [Request(at, np.array([1, 4, 13, 5]), sampling, seed=at) for at in range(4)]
    Echo.opened.clear()

    def run(spec):
        return run_episodes(worker.engine, requests, [{}] * 4, spec, worker.context)

    made = run(echoing(char()))
    responses = [row.tolist() for row in made["response_ids"]]
    returns = torch.as_tensor(made["episode_return"].values).tolist()
    opened = len(Echo.opened)
    failures = [
        said_by(lambda: run(echoing(char(), raises="step"))),
        said_by(lambda: run(echoing(Silent()))),
    ]
    return responses, returns, opened, failures
