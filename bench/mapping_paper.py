"""The planner against what HybridFlow (arXiv:2409.19256, section 8) measured on 16 machines of 8 A100-80GB: which placement
wins, which generation layout wins, bytes of a transition. Figures of data sheets, and one set of
efficiencies for all cases: EFFICIENCY.

python bench/mapping_paper.py [--plot FILE.svg]     prints tables, then how long planning takes (and draws it); three minutes

The paper's workload: 1,024 prompts of 1,024 tokens, 1,024 response tokens, PPO, 8 updates. 3D parallelism with bf16 weights,
fp32 gradients and Adam states, no offload. Ours, as the paper does not say: recomputation, micro-batches of one sequence,
pipelines of at most 16 stages.
"""

from __future__ import annotations

import argparse
import time

import attrs
from common import draw, emit

from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.kit.footprints import Spread, ThreeDSharding
from hybridflow.kit.huggingface.shapes import PUBLISHED
from hybridflow.planner import (
    Cluster,
    Mapping,
    NothingFitsError,
    PlannedModel,
    Task,
    Workload,
    plan_mapping,
)
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.pools import PoolPlanner

WORK = Workload(
    (
        Task("actor", "generate", 1024), Task("actor", "train", 128, 8), Task("critic", "infer", 1024),
        Task("critic", "train", 128, 8), Task("ref", "infer", 1024), Task("reward", "infer", 1024),
    ),
    1024,
    1024,
)  # fmt: skip


@attrs.frozen
class Paper(Spread):
    """3D parallelism with recomputation, and pipelines of at most so many stages."""

    way: ThreeDSharding = attrs.field(
        factory=lambda: ThreeDSharding(recompute=True, shares_weights=True)
    )
    max_pp: int = 16

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        return layout.pp <= self.max_pp


EFFICIENCY = Efficiency(
    training=0.5, inference=0.5, memory=0.7, link=0.3, network=0.6, overlap=0.2, network_latency_us=100.0, sequence_us=10.0,
    decode_step_us=20_000.0, micro_batch_us=300.0, update_ms=1600.0, call_ms=1000.0,
)  # fmt: skip
"""Found by a search over some hundred sets for the most of the paper's winners: it says that one set can tell the paper's
story, not that these are its machine's figures. Fixed costs (a second a call, 1.6 s an update, 20 ms a decoding step) are what
it needs."""


def placement(*pools: str) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(pool.split()) for pool in pools)


COLOCATE, SPLIT = placement("actor critic ref reward"), placement("actor ref", "critic reward")
STANDALONE, OWN_CRITIC = (
    placement("actor", "critic", "ref", "reward"),
    placement("actor ref reward", "critic"),
)
WINNERS = [
    ("13b", "13b", {16: COLOCATE, 32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: STANDALONE}),
    ("34b", "34b", {32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: SPLIT}),
    ("13b", "70b", {64: COLOCATE, 96: SPLIT, 128: OWN_CRITIC}),
]
TOLERANCE = 1.03


def models(actor: str, critic: str) -> list[PlannedModel]:
    policy, value = PUBLISHED[f"llama-{actor}"], PUBLISHED[f"llama-{critic}"]
    paper = Paper()
    given = {"limits": EngineLimits(max_sequences=1 << 40), "micro_batch_tokens": 2048}
    return [
        PlannedModel("actor", ModelSize(policy), paper, trained=True, **given),
        PlannedModel("critic", ModelSize(value, "value"), paper, trained=True, **given),
        PlannedModel("ref", ModelSize(policy), paper, **given),
        PlannedModel("reward", ModelSize(value, "value"), paper, **given),
    ]


def cluster(devices: int, efficiency: Efficiency = EFFICIENCY) -> Cluster:
    return Cluster.of("a100-80gb", devices // 8, between_gbs=25.0, efficiency=efficiency)


def header(*names: str) -> None:
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")


def winners(efficiency: Efficiency) -> int:
    met = 0
    header(
        "actor, critic",
        "devices",
        "the paper's winner",
        "ours for it",
        "our winner",
        "ours",
        "ratio",
    )
    for actor, critic, cases in WINNERS:
        for devices, want in cases.items():
            try:
                best = plan_mapping(
                    cluster(devices, efficiency), WORK, models(actor, critic), alternatives=14
                )
            except NothingFitsError as error:
                print(
                    f"| {actor}, {critic} | {devices} | {named(want)} | {error.problems[0]} | | | |"
                )
                continue
            theirs = next((m for m in (best, *best.others) if m.placement == want), None)
            ratio = theirs.seconds / best.seconds if theirs else float("inf")
            met += ratio <= TOLERANCE
            cells = [
                f"{actor}, {critic}",
                str(devices),
                named(want),
                told(theirs),
                named(best.placement),
                told(best),
                f"{ratio:.3f}",
            ]
            print("| " + " | ".join(cells) + " |")
    return met


def told(mapping: Mapping | None) -> str:
    if mapping is None:
        return "does not fit"
    return f"{mapping.seconds:.0f} s ({' + '.join(f'{t:.0f}' for t in mapping.stages)})"


def named(wanted: frozenset[frozenset[str]]) -> str:
    return " / ".join(sorted("+".join(sorted(pool)) for pool in wanted))


def generation_layouts() -> int:
    """On 16 devices, trained with pp 1, tp 8, dp 2, alone in its memory: seconds of generation and transition per t_g."""
    met = 0
    header("actor", "t_g 1", "t_g 2", "t_g 4", "t_g 8", "best", "the paper's")
    for name, want in (("7b", 2), ("13b", 4)):
        actor = models(name, name)[0]
        planner = PoolPlanner(cluster(16).nodes[0], WORK)
        option = planner.option(actor, ParallelLayout(1, 8, 2))
        cuts = {tp: GenerationLayout(ParallelLayout(dp=16), 1, tp) for tp in (1, 2, 4, 8)}
        found = {
            tp: planner.engine(option, 16, option.bytes.resident, cut) for tp, cut in cuts.items()
        }
        best = min((c.seconds, tp) for tp, c in found.items() if c)[1]
        met += best == want
        times = " | ".join(f"{c.seconds:.1f} s" if c else "no room" for c in found.values())
        print(f"| {name} | {times} | {best} | {want} |")
    return met


def transitions() -> None:
    """Bytes that a rank receives, as shares of the model; gathers as in system.md, at 128 devices."""
    header(
        "actor",
        "t_g, p_g of t, p",
        "planned",
        "gather over a replica",
        "gather over everything",
        "less",
    )
    for name, tg, pg, t, p in (
        ("7b", 2, 1, 8, 1),
        ("13b", 4, 1, 8, 1),
        ("34b", 8, 1, 8, 4),
        ("70b", 8, 1, 8, 8),
    ):
        actor = attrs.evolve(models(name, name)[0], settings=Paper(max_pp=80))
        planner = PoolPlanner(cluster(128).nodes[0], WORK)
        size = actor.size.params * actor.limits.weight_bytes
        trained, engines = (
            ParallelLayout(p, t, 128 // (p * t)),
            GenerationLayout(ParallelLayout(dp=128), pg, tg),
        )
        got = planner.simulator.received(actor, trained, engines) / size
        replica, everything = (t * p - 1) / (t * p), 127 / 128
        less = f"{100 * (1 - got / replica):.1f}%, {100 * (1 - got / everything):.1f}%"
        print(
            f"| {name} | {tg}, {pg} of {t}, {p} | {got:.3f} | {replica:.3f} | {everything:.3f} | {less} |"
        )


BARS = {128: 5, 1024: 30, 16384: 120}
"""Devices -> CPU seconds for PPO with four models of 7B."""
SAFE_BAR = 20
"""Of Safe RLHF with six on 128."""


def planning_times(plot: str | None) -> bool:
    """Whether the bars are met; with `plot` also sizes between, drawn."""
    ladder = [8 * 2**k for k in range(12)] if plot else list(BARS)
    ppo = {
        n: cpu_seconds(Cluster.of("a100-80gb", max(1, n // 8)), WORK, models("7b", "7b"))
        for n in ladder
    }
    six, work = safe_rlhf()
    safe = {
        n: cpu_seconds(cluster(n), work, six) for n in ([16, 32, 64, 128, 256] if plot else [128])
    }
    good = True
    for devices, seconds in ppo.items():
        good &= said(f"plan PPO, 4 models of 7B on {devices}", seconds, BARS.get(devices))
    for devices, seconds in safe.items():
        good &= said(
            f"plan Safe RLHF, 6 models of 7B on {devices}",
            seconds,
            SAFE_BAR if devices == 128 else None,
        )
    if plot:
        draw(
            plot,
            {"PPO, 4 models": ppo, "Safe RLHF, 6 models": safe},
            "devices",
            "CPU seconds of one core",
            beside=lambda axes: axes.plot(
                list(BARS), list(BARS.values()), "x", color="#999999", label="bars, 4 models"
            ),
            base=2,
        )
    return good


def safe_rlhf() -> tuple[list[PlannedModel], Workload]:
    seven = models("7b", "7b")
    more = [attrs.evolve(seven[1], name="cost_critic"), attrs.evolve(seven[3], name="cost")]
    tasks = (
        Task("actor", "infer", 1024), Task("cost", "infer", 1024), Task("cost_critic", "infer", 1024),
        Task("cost_critic", "train", 128, 8),
    )  # fmt: skip
    return [*seven, *more], attrs.evolve(WORK, tasks=(*WORK.tasks, *tasks))


def cpu_seconds(where: Cluster, work: Workload, what: list[PlannedModel]) -> float:
    started = time.process_time()
    plan_mapping(where, work, what)
    return time.process_time() - started


def said(name: str, seconds: float, bar: float | None) -> bool:
    if bar is None:
        return emit(name, seconds, "CPU s")
    return emit(
        name, seconds, "CPU s", ratio=seconds / bar, against=f"{bar} s", bar=1.0, at_most=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", help="draw the planning times: a file ending in .svg or .png")
    plot = parser.parse_args().plot
    emit("placement winners with the default efficiencies", winners(Efficiency()), "of 12")
    found = winners(EFFICIENCY)
    layouts = generation_layouts()
    transitions()
    good = emit(
        "placement winners of the paper",
        found,
        "of 12",
        ratio=found / 12,
        against="12",
        bar=10 / 12,
    )
    good &= emit(
        "generation layouts of the paper", layouts, "of 2", ratio=layouts / 2, against="2", bar=1.0
    )
    good &= planning_times(plot)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
