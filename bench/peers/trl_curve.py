"""Trains a model by TRL's GRPO on sums; prints a JSON line {"rewards": [mean of each step, ...]}.

Run by bench/like_trl.py in TRL's own environment: python trl_curve.py SETTINGS.json SEED
"""

import contextlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
settings = json.loads(Path(sys.argv[1]).read_text())
spec = importlib.util.spec_from_file_location("rewards", settings["rewards"])
rewards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rewards)

# What is not named is TRL's default: loss_type "dapo", no KL, rewards scaled by each group's deviation.
arguments = GRPOConfig(
    output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
    per_device_train_batch_size=settings["prompts"] * settings["group"], num_generations=settings["group"],
    max_completion_length=settings["tokens"], max_steps=settings["steps"], learning_rate=settings["lr"],
    lr_scheduler_type="constant", temperature=1.0, top_p=1.0, top_k=0, seed=int(sys.argv[2]),
    logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = GRPOTrainer(
    model=settings["model"],
    reward_funcs=rewards.right,
    args=arguments,
    train_dataset=load_dataset("json", data_files=settings["data"], split="train"),
    processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
)
with contextlib.redirect_stdout(sys.stderr):
    trainer.train()
rewards = [step["reward"] for step in trainer.state.log_history if "reward" in step]
print(json.dumps({"rewards": rewards}))
