"""Several turns in a step: an environment answers, and its tokens are not trained on."""

from __future__ import annotations

import glob
import math
import shutil
import subprocess
import sys
import tempfile
import threading

import pytest
import torch
from helpers.episodes import Echo
from helpers.paths import matrix
from helpers.steps import Watched, column

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.values.seeds import row_seed
from hybridflow.core.workers.environment_calls import THREAD
from hybridflow.kit.sandbox.process import Limits
from hybridflow.kit.sandbox.programs import run_program
from hybridflow.kit.testing import TinyRun


def tables(max_turns: int = 8, max_tokens: int = 16, **options):
    section = {"name": "helpers.episodes:Echo", "options": options, "max_turns": max_turns}
    # the stop often: the model speaks in short turns
    sampling = {"max_tokens": max_tokens, "logit_bias": {"14": 2.0}}
    return {"environment": section, "sampling": sampling, "reward": {"function": "environment"}}


class Kept(Watched, GRPO):
    pass


def run(**given):
    return TinyRun(Kept(GRPOConfig(prompts_per_step=4, group_size=4)), tables(**given))


def rows(batch):
    names = ("response_ids", "loss_mask", "turn", "rollout_logprobs", "weight_version")
    per_token = [list(batch[name]) for name in names]
    return list(
        zip(*per_token, batch["turn_rewards"].values, batch["turn_states"].values, strict=True)
    )


def test_answers_stand_between_turns_and_are_not_trained_on():
    Echo.closed.clear()
    with run() as tiny:
        stop, eos = (
            int(tiny.session.prepared.tokenizer.encode("=")[0]),
            tiny.session.prepared.tokenizer.eos_id,
        )
        said = tiny.session.prepared.tokenizer.encode("12").tolist()
        metrics = tiny.step()
        batch = tiny.algorithm.batch
    seen = 0
    for ids, mask, turn, logprobs, version, rewards, states in rows(batch):
        assert torch.equal(mask.bool(), turn >= 0)
        assert (
            (logprobs[mask == 0] == 0).all()
            and (version[mask == 0] == -1).all()
            and (logprobs[mask == 1] < 0).all()
        )
        assert len(rewards) == len(states) and states[0] == "begin"
        for number in range(
            len(rewards) - 1
        ):  # every turn but the last ends with a stop, and is answered
            places = (turn == number).nonzero()[:, 0]
            assert ids[places[-1]] == stop and not (ids[places[:-1]] == stop).any()
            answer = ids[places[-1] + 1 :][: len(said)].tolist()
            assert answer == said[: len(answer)]
            seen += 1
        if (ids == eos).any():
            assert ids[-1] == eos and states[1:] == [f"after {n}" for n in range(len(rewards) - 1)]
    assert seen > 4, "the test needs answered turns"
    assert len(Echo.closed) == 16
    returns = [sum(r) for r in batch["turn_rewards"].values]
    assert column(batch, "episode_return").tolist() == pytest.approx(returns)
    assert column(batch, "scores").tolist() == pytest.approx(returns)
    assert metrics["actor/turns"] > 1 and metrics["actor/episode_return"] == pytest.approx(
        sum(returns) / 16
    )


class Opens(Echo):
    """Has prompts of its own, which are longer than the rows'."""

    own_prompt = True

    def reset(self, start):
        super().reset(start)
        return Answer(
            ids=tuple(start.tokenizer.encode(f"1+{start.prompt}").tolist()), state="begin"
        )


@pytest.mark.parametrize("environment", ["helpers.episodes:Echo", f"{__name__}:Opens"])
def test_the_trainers_logprobs_are_the_rollouts_in_every_turn(environment):
    with TinyRun(run().algorithm, {**tables(), "environment": {"name": environment}}) as tiny:
        rows = tiny.ctx.prompts(8)
        batch = tiny.ctx.actor.generate(rows)
        opened = [tiny.session.prepared.tokenizer.decode(ids) for ids in batch["prompt_ids"]]
        drawn = [tiny.session.prepared.tokenizer.decode(ids) for ids in rows["prompt_ids"]]
        assert opened == [f"1+{text}" if "Opens" in environment else text for text in drawn]
        again = tiny.ctx.actor.logprobs(batch)["old_logprobs"].padded()
        mask, made = column(batch, "loss_mask").bool(), column(batch, "rollout_logprobs")
        tiny.ctx.finish()
    assert (column(batch, "turn") > 0).any()
    torch.testing.assert_close(again[mask], made[mask], atol=1e-4, rtol=0)


CHILD = "import sys\nfor line in sys.stdin: print(eval(line), flush=True)"
KINDS = {
    "answers": ("2+", "complete"),
    "hangs": ("__import__('time').sleep(600)", "failed_tool"),
    "raises": ("1 / 0", "failed_tool"),
    "floods": ("'1' * 10**6", "truncated_tokens"),
    "dies": ("__import__('os').kill(__import__('os').getpid(), 9)", "failed_tool"),
    "jailed": ("while True: pass", "failed_tool"),
}
"""What a tool is told to do -> the program of it, and the outcome of its episode."""


def kind_of(seed: int) -> str:
    return list(KINDS)[seed % len(KINDS)]


class Tool(Environment):
    """Its tool is a process with a folder of its own, and most of them go wrong at their first answer."""

    stops = ("=",)
    made: list[Tool] = []

    def reset(self, start):
        self.kind = kind_of(start.seed)
        self.folder = tempfile.mkdtemp(prefix="hybridflow-tool-")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], text=True, cwd=self.folder, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        Tool.made.append(self)
        return Answer("1+")

    def step(self, turn):
        if turn.number == 1:
            return Answer(reward=1.0, done=True)
        program, _ = KINDS[self.kind]
        if self.kind == "answers":
            program = repr(program)
        if self.kind == "jailed":
            found = run_program(program, limits=Limits(seconds=0.5))
            raise RuntimeError(found.reason)
        self.process.stdin.write(f"{program}\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline().strip()
        if not said:
            raise EOFError("the tool is gone")
        return Answer(said)

    def close(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("free", [pytest.param(False, marks=matrix), True])
def test_a_run_goes_on_while_tools_hang_raise_flood_and_die(free):
    Tool.made.clear()
    patterns = [f"{tempfile.gettempdir()}/hybridflow-{name}-*" for name in ("tool", "jail")]
    before = [glob.glob(pattern) for pattern in patterns]
    others = set(threading.enumerate())
    environment = {
        "name": f"{__name__}:Tool",
        "free": free,
        "timeout_s": 5.0,
        "on_failure": {"mask": True, "max_failed": 0.95},
    }
    given = {
        "environment": environment,
        "sampling": {"max_tokens": 24, "logit_bias": {"14": 12.0}},
        "reward": {"function": "environment"},
    }
    with TinyRun(Kept(GRPOConfig(prompts_per_step=5, group_size=4)), given) as tiny:
        seed = tiny.job.run.seed
        for _ in range(2):
            metrics = tiny.step()
            batch = tiny.algorithm.batch
            kinds = [
                kind_of(row_seed(seed, number)) for number in column(batch, "sample_id").tolist()
            ]
            assert set(kinds) == set(KINDS), "the test needs each kind"
            assert batch["outcome"].values == [KINDS[kind][1] for kind in kinds]
            assert all(math.isfinite(value) for value in metrics.values())
            lost = [outcome == "failed_tool" for outcome in batch["outcome"].values]
            assert metrics["actor/failed_tool"] == pytest.approx(sum(lost) / 20)
            assert column(batch, "scores").isnan().tolist() == lost
            # Closing ended what the hanging tools' threads were waiting for.
            for thread in set(threading.enumerate()) - others:
                if thread.name == THREAD:
                    thread.join(20)
                    assert not thread.is_alive()
    assert len(Tool.made) == 40
    assert all(tool.process.poll() is not None for tool in Tool.made)
    assert [glob.glob(pattern) for pattern in patterns] == before
