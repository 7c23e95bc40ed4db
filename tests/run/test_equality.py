"""The same config gives the same numbers in both runtimes, on any ranks, and with any micro-batches."""

import pytest
import torch
from helpers.paths import matrix
from helpers.tiny import learning, ran_here, write
from safetensors.torch import load_file

from hybridflow.kit.recording import SAMPLES, read_rows

WARM = {
    'name = "grpo", prompts_per_step = 4, group_size = 4, mini_batch_size = 8': 'name = "sft", batch_size = 64'
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A half-trained adder, so that rewards differ within groups and logits are not flat."""
    folder = tmp_path_factory.mktemp("policy")
    write(folder, **WARM)
    settings = (
        'data.response="{answer}"',
        "run.steps=60",
        "run.export=true",
        "actor.optimizer.lr=3e-3",
    )
    ran_here(folder, *settings)
    return folder / "runs/tiny/export/actor"


def trained(folder, policy, *settings, algorithm="grpo"):
    folder.mkdir()
    changes = {f"model.config = {_model()}": f'model.path = "{policy}"'}
    if algorithm == "ppo":
        changes['name = "grpo", prompts_per_step = 4, group_size = 4, mini_batch_size = 8'] = (
            'name = "ppo", prompts_per_step = 18, mini_batch_size = 8'
        )
    write(folder, **changes)
    held_out = (
        'validation.data.options.split="held-out"',
        "validation.data.limit=64",
        "validation.at_start=true",
        "validation.samples=64",
    )
    # Adam divides a gradient by its size: with a small eps one of mere rounding moves a weight by all of lr.
    arguments = (
        "run.steps=2",
        "actor.optimizer.eps=1e-4",
        "run.export=true",
        f'tokenizer.path="{policy}"',
        *held_out,
        *settings,
    )
    text = (
        (folder / "tiny.toml")
        .read_text()
        .replace('[tokenizer]\ncharacters = "0123456789+="', "[tokenizer]")
    )
    (folder / "tiny.toml").write_text(text)
    ran_here(folder, *arguments)
    return folder / "runs/tiny"


def _model():
    from helpers.tiny import MODEL

    return MODEL


def assert_equal(a, b):
    """Losses, gradient norms and every metric of learning to 1e-5 relative; greedy tokens identical; weights close."""
    for first, second in zip(learning(a), learning(b), strict=True):
        assert first.keys() == second.keys()
        for name in first:
            if "mismatch" in name:
                assert first[name] < 1e-4 or "ratio" in name
                continue
            assert first[name] == pytest.approx(second[name], rel=1e-5, abs=2e-6), name
    # Greedy responses, and the rollouts that were trained on
    names = ("step", "data", "group", "prompt_ids", "response_ids", "outcome")
    first, second = (list(read_rows(folder, SAMPLES, names)) for folder in (a, b))
    assert first == second and len(first) >= 64
    for role in sorted(p.name for p in (a / "export").iterdir()):
        mine, theirs = (
            load_file(folder / "export" / role / "model.safetensors") for folder in (a, b)
        )
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=2e-4, atol=2e-4)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "ray with tp 2, rewards and data in a pool on CPUs": (
        "runtime=ray",
        "pools.main=[2]",
        "actor.layout.tp=2",
        "pools.judges={devices=[3], device='cpu'}",
        "reward.pool='judges'",
    ),
    "ray with dp 2, engines of tp 2 on the same ranks": (
        "runtime=ray",
        "pools.main=[2]",
        "actor.generation.tp=2",
        "actor.sync.verify=true",
    ),
    "ray, engines of tp 2 in a pool of their own, weights through the object store in small buckets": (
        "runtime=ray",
        "pools.main=[1]",
        "pools.engines=[2]",
        'actor.generation.pool="engines"',
        "actor.generation.tp=2",
        "actor.sync.verify=true",
        'actor.sync.transport="store"',
        "actor.sync.bucket_mb=0.1",
    ),
    "inline, engines in a pool of their own": (
        "pools.main=[1]",
        "pools.engines=[1]",
        'actor.generation.pool="engines"',
        "actor.sync.verify=true",
    ),
    "inline with small micro-batches": ("actor.micro_batch_tokens=24",),
}


@pytest.fixture(scope="module")
def reference(policy, tmp_path_factory):
    root = tmp_path_factory.mktemp("reference")
    return {name: trained(root / name, policy, algorithm=name) for name in ("grpo", "ppo")}


FEWER = (
    "ray, engines of tp 2 in a pool of their own, weights through the object store in small buckets",
    "ray with tp 2, rewards and data in a pool on CPUs",
    "ray with dp 2, engines of tp 2 on the same ranks",
)
"""Layouts whose parts other tests have (tests/backends/fsdp)."""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(LAYOUTS[name], marks=[matrix] if name in FEWER else [], id=name)
        for name in LAYOUTS
    ],
)
def test_grpo_gives_the_numbers_of_one_inline_rank(
    settings, policy, reference, ray_cluster, tmp_path
):
    assert_equal(reference["grpo"], trained(tmp_path / "run", policy, *settings))


@matrix
def test_ppo_with_uneven_rows_on_dp_2_and_the_critic_in_a_pool_of_its_own_gives_the_same_numbers(
    policy, reference, ray_cluster, tmp_path
):
    pools = (
        "runtime=ray",
        "pools.main=[2]",
        "pools.side=[1]",
        'critic.pool="side"',
        "critic.layout.dp=1",
    )
    assert_equal(reference["ppo"], trained(tmp_path / "run", policy, *pools, algorithm="ppo"))
