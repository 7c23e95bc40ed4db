"""A stranger's package (third_party/), installed as a user would, brings an algorithm, rewards, a protocol and hooks.

Nothing of ours names it: it comes in by its entry points, or by "module:Object" from the current folder.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from helpers.packages import hybridflow, install, python
from helpers.paths import matrix

SOURCE = Path(__file__).parent / "third_party"
CONFIG = """
algorithm = { name = "acme_baseline", acme_baseline = { prompts_per_step = 6 } }
runtime = "inline"
run = { steps = 2, checkpoint_every = 1, trackers = ["jsonl"] }
tokenizer.characters = "0123456789+="
data = { source = "arithmetic", bos = true, answer = "{answer}", max_prompt_tokens = 8 }
sampling.max_tokens = 4
reward = { function = "acme_digits", options = { scale = 0.5 } }
[actor]
model.config = { model_type = "qwen2", vocab_size = 16, hidden_size = 32, num_hidden_layers = 2, \
num_attention_heads = 2, num_key_value_heads = 2, intermediate_size = 64, max_position_embeddings = 32 }
optimizer.lr = 1e-3
[twin.model]
init_seed = 7
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The package in a folder of its own, put there by pip, without the network."""
    return install(tmp_path_factory.mktemp("site"), SOURCE)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_package_is_named_nowhere_in_our_code():
    root = Path(__file__).parents[2]
    for folder in ("core", "algorithms", "backends"):
        for path in (root / folder).rglob("*.py"):
            assert (
                "acme" not in path.read_text().replace("acme.length", "").lower()
                or path.name == "hookspecs.py"
            ), path


def test_its_plugins_are_listed_with_package_version_and_state(installed, tmp_path):
    done = hybridflow(installed, tmp_path, "plugins", "--capabilities")
    assert done.returncode == 0, done.stderr
    assert re.search(r"algorithm +acme_baseline +acme-rl +2\.5 +ready", done.stdout)
    assert re.search(r"protocol +ACME_ROUND_ROBIN +acme-rl +2\.5 +ready", done.stdout)
    assert re.search(r"reward +acme_digits +acme-rl +2\.5 +ready", done.stdout)
    assert re.search(
        r"reward +acme_needs_more +acme-rl +2\.5 +missing: acme_extra +ask acme", done.stdout
    )


def test_a_config_names_its_algorithm_and_reward_and_its_hooks_are_called(installed, tmp_path):
    (tmp_path / "acme.toml").write_text(CONFIG)
    shown = hybridflow(installed, tmp_path, "show", "acme.toml", "--docs")
    assert re.search(
        r"algorithm\.momentum +0\.5 +default\n +# How much of the old baseline stays\.",
        shown.stdout,
    )
    done = hybridflow(installed, tmp_path, "run", "acme.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs/acme"
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(
        0 <= row["reward/scores"] <= 0.5 and "baseline" in row and "actor/reinforce" in row
        for row in metrics
    )
    assert all("twin_logprob" in row for row in metrics)
    calls = [(row["hook"], row["step"]) for row in rows(folder / "acme.jsonl")]
    for step in (1, 2):
        assert {("step_end", step), ("checkpoint", step), ("metrics", step)} <= set(calls)
    assert all(
        row["complete"] for row in rows(folder / "acme.jsonl") if row["hook"] == "checkpoint"
    )
    state = json.loads((folder / "checkpoints/step-00000002/state.json").read_text())
    assert state["algorithm"] == {"baseline": metrics[-1]["baseline"]}


def test_its_protocol_serves_a_method_that_names_it(installed, tmp_path):
    code = """
        import torch
        from hybridflow.core.values.batch import Batch
        from hybridflow.core.groups.group import Pool, WorkerGroup
        from hybridflow.core.plugins import registry
        from hybridflow.core.contracts.runtime import ResourcePool
        from hybridflow.core.contracts.worker import Worker, register

        class Marker(Worker):
            @register("ACME_ROUND_ROBIN")
            def mark(self, batch: Batch) -> Batch:
                numbers = torch.as_tensor(batch["number"].values)
                return Batch({"number": numbers, "rank": torch.full_like(numbers, self.rank)})

        runtime = registry().get("runtime", "inline")(None)
        runtime.start()
        group = WorkerGroup(Marker, Pool.launch(ResourcePool("three", (3,)), runtime))
        marked = group.mark(Batch({"number": torch.arange(7)}))
        print(torch.as_tensor(marked["number"].values).tolist(), torch.as_tensor(marked["rank"].values).tolist())
        runtime.shutdown()
    """
    (tmp_path / "use.py").write_text(textwrap.dedent(code))
    done = python(installed, tmp_path, "use.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 1, 2, 3, 4, 5, 6] [0, 1, 2, 0, 1, 2, 0]"


@matrix
def test_the_same_algorithm_and_rewards_are_found_in_the_current_folder(tmp_path):
    shutil.copy(SOURCE / "src/acme_rl/algorithm.py", tmp_path / "my_algorithm.py")
    shutil.copy(SOURCE / "src/acme_rl/rewards.py", tmp_path / "my_rewards.py")
    lines = [line for line in CONFIG.splitlines() if not line.startswith(("algorithm", "reward"))]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    algorithm = 'algorithm={name = "my_algorithm:BatchBaseline", prompts_per_step = 5}'
    a_class = '{name = "class", function = "my_rewards:Digits", options = {scale = 0.5}}'
    a_function = '{name = "function", function = "my_rewards:share_of_digits"}'
    done = hybridflow(
        None, tmp_path, "run", "mine.toml", algorithm, f"reward.parts=[{a_class}, {a_function}]"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = rows(tmp_path / "runs/mine/metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(0 <= row["reward/scores"] <= 1.5 for row in metrics)


def test_a_plugin_that_lacks_what_it_needs_says_what_to_do(installed, tmp_path):
    code = (
        "from hybridflow.core.plugins import registry; registry().get('reward', 'acme_needs_more')"
    )
    done = python(installed, tmp_path, "-c", code)
    assert "needs acme_extra, not installed here: ask acme" in done.stderr
