"""Five plans of examples/plans beside a count by hand (bench/plans_by_hand.py): seconds of each stage and of a step, and bytes
of a device at rest, while the actor generates, while a model reads, and while one trains.

python bench/plans.py         seconds; needs no GPU

One JSON line per figure; exits 1 where one is off by more than 15%, or where a plan is no longer the one that was counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, emit
from plans_by_hand import PLANS, count

from hybridflow.cli.plan import unplaced_jobs
from hybridflow.core.contracts.planner import STAGE_NAMES, STAGES
from hybridflow.planner.jobs import plan_job
from hybridflow.planner.report import phases
from hybridflow.planner.search import Mapping

BAR = 0.15
COUNTED = {
    "7b_grpo 8xH100": ("7b_grpo", "h100:8"),
    "70b_ppo 64xH100": ("70b_ppo", "h100:8x8@3200"),
    "30b_a3b_grpo 16xH100": ("30b_a3b_grpo", "h100:2x8@3200"),
    "30b_a3b_grpo 16xH200": ("30b_a3b_grpo", "h200:2x8@3200"),
    "05b_grpo 1xH200": ("05b_grpo", "h200:1"),
}
"""Name of a count -> the config in examples/plans, and the cluster."""


def planned(name: str, cluster: str) -> Mapping:
    [[job], _] = unplaced_jobs(ROOT / "examples" / "plans" / f"{name}.toml", [])
    return plan_job(job, cluster).best()


def as_counted(case: dict, mapping: Mapping) -> Iterator[str]:
    """What of a plan is not what the count took for given."""
    if len(mapping.pools) != 1 or mapping.devices != case["n"]:
        yield f"it has {len(mapping.pools)} pools and {mapping.devices} devices"
        return
    for choice in mapping.pools[0].entry.choices:
        layout = choice.option.layout
        if layout.dp != case["n"]:
            yield f"{choice.option.model.name} has pp {layout.pp} tp {layout.tp} dp {layout.dp}"
        if choice.engines is None:
            continue
        if (choice.engines.tp, choice.engines.pp) != (case["tp"], case["pp"]):
            yield f"its engines have tp {choice.engines.tp} pp {choice.engines.pp}"
        if abs(choice.cache_bytes / case["cache"] - 1) > 0.01:
            yield f"a cache has {choice.cache_bytes / 1e9:.2f} GB"


def main() -> int:
    good = True
    for case in PLANS:
        mapping = planned(*COUNTED[case["name"]])
        for problem in as_counted(case, mapping):
            print(f"{case['name']}: {problem}: count it anew", file=sys.stderr)
            good = False
        hand = count(case)

        # Seconds, then bytes.
        [pool] = mapping.pools
        said = {
            f"{STAGE_NAMES[verb]}_s": time
            for verb, time in zip(STAGES, mapping.stages, strict=True)
        }
        said["step_s"] = mapping.seconds
        generating, reading, training = phases(pool)
        resident = sum(choice.option.bytes.resident for choice in pool.entry.choices)
        said |= {
            "rest_gb": resident / 1e9, "generating_gb": generating / 1e9, "reading_gb": reading / 1e9,
            "training_gb": training / 1e9,
        }  # fmt: skip
        for figure, value in said.items():
            if not hand[figure]:
                continue
            unit = "s" if figure.endswith("_s") else "GB"
            emit(
                f"{case['name']}: {figure}",
                value,
                unit,
                ratio=value / hand[figure],
                against=f"by hand {hand[figure]:.4g}",
            )
            good &= emit(
                f"{case['name']}: {figure} off by",
                abs(value / hand[figure] - 1),
                "of 1",
                bar=BAR,
                at_most=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
