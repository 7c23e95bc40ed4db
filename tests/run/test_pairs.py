"""Preferences in whole runs: held-out accuracy of reward models and of DPO, and a reward model as a later stage's reward."""

from __future__ import annotations

import json

from helpers.tiny import MODEL

from hybridflow.settle.launch import run as launch

CONFIG = f"""
runtime = "inline"
[run]
steps = 2
folder = "FOLDER"
trackers = ["jsonl"]
[tokenizer]
characters = "0123456789+="
[data]
source = "helpers.pair_rows:RightAndWrong"
bos = true
response = "{{chosen}}"
rejected = "{{rejected}}"
answer = "{{chosen}}"
max_prompt_tokens = 8
[sampling]
max_tokens = 4
[validation]
every = 1
generate = false
data.limit = 16
batch_rows = 5
[actor]
model.config = {MODEL}
[stages.reward]
algorithm = {{ name = "reward_model", pairs_per_step = 8 }}
reward.model.config = {MODEL}
[stages.dpo]
algorithm = {{ name = "dpo", pairs_per_step = 8 }}
[stages.ppo]
algorithm = {{ name = "ppo", prompts_per_step = 8 }}
validation.generate = true
reward.model.path = "stage:reward"
critic.model.path = "stage:reward"
actor.model.path = "stage:dpo"
"""


def test_held_out_pairs_are_judged_and_the_model_becomes_a_reward(tmp_path):
    (tmp_path / "pairs.toml").write_text(CONFIG.replace("FOLDER", str(tmp_path / "runs")))
    outcome = launch(tmp_path / "pairs.toml")
    assert outcome.state == "finished"
    found = {}
    for stage in ("reward", "dpo", "ppo"):
        lines = (tmp_path / "runs" / "pairs" / stage / "metrics.jsonl").read_text().splitlines()
        found[stage] = [
            row
            for row in map(json.loads, lines)
            if any(name.startswith("validation/") for name in row)
        ]
    for stage, loss in (("reward", "preference_loss"), ("dpo", "dpo_loss")):
        assert len(found[stage]) == 2
        for row in found[stage]:
            assert 0 <= row["validation/accuracy"] <= 1 and row[f"validation/{loss}"] > 0
    assert found["ppo"] and "validation/score" in found["ppo"][-1]
