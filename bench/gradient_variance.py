"""Variance of the policy gradient over its squared mean, of critic-free algorithms at G = 8 on one warmed-up policy.

python bench/gradient_variance.py [--batches 64] [--warm-up 0.6]

Every estimator sees the same batches (8 prompts, 8 responses each, of the arithmetic task, without KL). Its loss is
REINFORCE's, -A log p summed over a response's tokens and averaged over responses, with its own advantages. variance: the mean
over batches of |g - mean g|^2. Against plain REINFORCE (A = score). The bar: RLOO's is lower.

Scores are 0 or 1. A constant added to every score moves plain REINFORCE's variance and no other's: it is measured for scores
of -1/2 or 1/2 (as good as -1 or 1), and of 1 or 2, too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import ROOT, emit

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import ClippedConfig, PolicyLoss
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.kit.testing import TinyRun
from hybridflow.settle.launch import run as launch

PROMPTS, GROUP = 8, 8
WARM_UP = (
    "stages.grpo.run.steps=1",
    "stages.grpo.validation.every=1",
    "stages.grpo.algorithm.prompts_per_step=8",
)
SHIFTS = {"REINFORCE": 0.0, "REINFORCE, scores less 1/2": -0.5, "REINFORCE, scores plus 1": 1.0}
ESTIMATORS: dict[str, PolicyGradient | None] = {
    **dict.fromkeys(SHIFTS),
    "RLOO": RLOO(RLOOConfig(kl_coef=0.0, group_size=GROUP)),
    "GRPO": GRPO(GRPOConfig(group_size=GROUP)),
    "ReMax": ReMax(ReMaxConfig(kl_coef=0.0, group_size=GROUP)),
    "REINFORCE++": ReinforcePP(ReinforcePPConfig(kl_coef=0.0)),
}


def padded(column) -> torch.Tensor:
    return column.padded().float() if column.lengths is not None else torch.as_tensor(column.values)


def gradient(worker, batch, loss) -> torch.Tensor:
    worker._losses([(batch, loss)], train=True)
    parameters = list(worker.backend.module.parameters())
    found = torch.cat([p.grad.flatten().clone() for p in parameters if p.grad is not None])
    for p in parameters:
        p.grad = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument(
        "--warm-up",
        type=float,
        help="held-out score at which the warm-up ends; default: the example's, 0.6",
    )
    arguments = parser.parse_args()
    until = (
        ()
        if arguments.warm_up is None
        else (f"stages.warm-up.validation.stop_at={arguments.warm_up}",)
    )
    with tempfile.TemporaryDirectory() as folder:
        launch(
            ROOT / "examples" / "arithmetic.toml",
            [f"run.folder={folder}", "runtime.name=inline", *WARM_UP, *until],
        )
        measure(Path(folder) / "arithmetic" / "warm-up" / "export" / "actor", arguments.batches)


def measure(warm: Path, batches: int) -> None:
    tables = {
        "actor": {"model": {"path": str(warm)}, "micro_batch_tokens": 8192}, "reward": {"function": "exact_match"},
        "data": {"limit": 0}, "tokenizer": {"path": str(warm)},
    }  # fmt: skip
    loss = PolicyLoss(ClippedConfig(how="seq-mean-token-sum"), on_policy=True)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ESTIMATORS}
    with TinyRun(
        RLOO(RLOOConfig(kl_coef=0.0, group_size=GROUP, prompts_per_step=PROMPTS)), tables
    ) as run:
        worker = run.worker("actor")
        for _ in range(batches):
            prompts = run.ctx.prompts(PROMPTS)
            batch = run.ctx.actor.generate(prompts.repeat(GROUP))
            batch = batch.join(run.ctx.reward.score(batch))
            greedy = run.ctx.reward.score(run.ctx.actor.generate(prompts, greedy=True)).rename(
                scores="baseline_scores"
            )
            scores, group, mask = (padded(batch[n]) for n in ("scores", "group", "loss_mask"))
            for name, algorithm in ESTIMATORS.items():
                given = {"scores": scores, "loss_mask": mask}
                if name in ("RLOO", "GRPO"):
                    given["group"] = group
                if name == "ReMax":
                    given["baseline_scores"] = padded(greedy.repeat(GROUP)["baseline_scores"])
                if algorithm is None:
                    made = (scores + SHIFTS[name])[:, None] * mask
                else:
                    made = algorithm.advantages(**given)["advantages"]
                rows = [
                    row[: int(n)] for row, n in zip(made, batch["loss_mask"].lengths, strict=True)
                ]
                found[name].append(
                    gradient(worker, batch.with_columns(advantages=column_of(rows)), loss)
                )
            run.ctx.finish()
    relative = {}
    for name, gradients in found.items():
        stacked = torch.stack(gradients).double()
        mean = stacked.mean(0)
        relative[name] = float((stacked - mean).square().sum(1).mean() / mean.square().sum())
    met = True
    for name, value in relative.items():
        ratio = None if name == "REINFORCE" else value / relative["REINFORCE"]
        bar = 1.0 if name == "RLOO" else None
        what = f"gradient variance / squared mean, {name}"
        met &= emit(what, value, "", ratio=ratio, against="REINFORCE", bar=bar, at_most=True)
    raise SystemExit(not met)


def column_of(rows: list[torch.Tensor]):
    from hybridflow.core.values.columns import tokens

    return tokens(rows, torch.float32)


if __name__ == "__main__":
    main()
