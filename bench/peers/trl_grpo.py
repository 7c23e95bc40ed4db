"""A GRPO step of TRL on the shapes of bench/grpo_step.py; prints a JSON line
{"seconds": [per step, ...], "processor": [...]}.

Run by bench/grpo_step.py in TRL's own environment: python trl_grpo.py MODEL_FOLDER LENGTHS.json STEPS
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer

folder, lengths_file, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
lengths = torch.tensor(json.loads(Path(lengths_file).read_text()))
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.padding_side = "left"
rows, group = len(lengths), 8
sums = [(f"{a}+{b}=", str(a + b)) for a in range(10, 60) for b in range(10, 60)][
    : steps * rows // group + rows
]
data = Dataset.from_dict({"prompt": [p for p, _ in sums], "answer": [s for _, s in sums]})


class ForceLength(LogitsProcessor):
    """Row i ends with eos as token number lengths[i], and not before."""

    def __init__(self, prompt: int):
        self.prompt = prompt

    def __call__(self, input_ids, scores):
        ends = lengths[: len(scores)] == input_ids.shape[1] - self.prompt + 1
        eos = tokenizer.eos_token_id
        scores[:, eos] = float("-inf")
        forced = torch.full_like(scores, float("-inf"))
        forced[:, eos] = 0.0
        return torch.where(ends[:, None], forced, scores)


class Timed(GRPOTrainer):
    stamps: list = []

    def training_step(self, *args, **kwargs):
        self.stamps.append((time.perf_counter(), time.process_time()))
        return super().training_step(*args, **kwargs)


def reward(prompts, completions, answer, **_):
    return [
        sum(x == y for x, y in zip(c, a, strict=False)) / len(a)
        for c, a in zip(completions, answer, strict=False)
    ]


arguments = GRPOConfig(
    output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, per_device_train_batch_size=rows,
    num_generations=group, max_completion_length=int(lengths.max()), max_steps=steps, num_iterations=1, beta=0.0,
    learning_rate=1e-4, temperature=1.0, top_p=1.0, top_k=0, logging_steps=1, report_to=[], save_strategy="no",
    gradient_checkpointing=False, disable_tqdm=True, lr_scheduler_type="constant",
)  # fmt: skip
trainer = Timed(
    model=folder,
    reward_funcs=reward,
    args=arguments,
    train_dataset=data,
    processing_class=tokenizer,
)
generate = trainer.model.generate


def forced(*args, **kwargs):
    ids = kwargs.get("input_ids", args[0] if args else None)
    return generate(
        *args, **kwargs, logits_processor=LogitsProcessorList([ForceLength(ids.shape[1])])
    )


trainer.model.generate = forced
with contextlib.redirect_stdout(sys.stderr):
    trainer.train()
pairs = list(zip(trainer.stamps, trainer.stamps[1:], strict=False))
seconds = [after[0] - before[0] for before, after in pairs]
processor = [after[1] - before[1] for before, after in pairs]
tokens = trainer.state.log_history[-2].get("completions/mean_length")
print(json.dumps({"seconds": seconds, "processor": processor, "mean_length": tokens}))
