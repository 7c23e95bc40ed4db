"""Supervised fine-tuning by TRL on the rows of bench/sft_step.py; prints a JSON line.

Run by bench/sft_step.py in TRL's own environment: python trl_sft.py MODEL_FOLDER ROWS.json STEPS HOW [LENGTH BATCH]

HOW is "padded", with all rows of a step in one batch, or "packed": rows are packed into sequences of LENGTH tokens, BATCH of
them a pass, as many passes a step as the rows of a step need. The line is {"seconds": [per step], "processor": [...],
"tokens": [real ones of each], "isolated": whether a row's outputs stay while its packed neighbour changes}.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

folder, rows_file, steps, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
step_rows = json.loads(Path(rows_file).read_text())
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
packed = how == "packed"
tokens_of_a_step = sum(map(len, step_rows))
rows = step_rows * (steps + 1)
options = {"per_device_train_batch_size": len(step_rows), "max_length": max(map(len, step_rows))}
if packed:
    length, batch = int(sys.argv[5]), int(sys.argv[6])
    passes = max(1, round(tokens_of_a_step / (length * batch)))
    options = {
        "packing": True,
        "max_length": length,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": passes,
    }


class Timed(SFTTrainer):
    stamps: list = []
    counts: list = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.stamps.append((time.perf_counter(), time.process_time()))
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        self.counts.append(int(real.sum()))
        return super().training_step(model, inputs, *args, **kwargs)


arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, max_steps=steps, learning_rate=1e-4,
    logging_steps=1000, report_to=[], save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    lr_scheduler_type="constant", **options,
)  # fmt: skip
trainer = Timed(
    model=folder,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
    processing_class=AutoTokenizer.from_pretrained(folder),
)


def isolated() -> bool:
    """Whether the second row of a packed sequence has the same outputs beside another first row."""
    batch = next(iter(trainer.get_train_dataloader()))
    first, second = (batch["position_ids"][0] == 0).nonzero().flatten()[:2].tolist()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, first:second] = 3
    with torch.no_grad():
        logits = [trainer.model(**each).logits[0, second:] for each in (inputs, other)]
    return torch.allclose(*logits, atol=1e-5)


with contextlib.redirect_stdout(sys.stderr):
    apart = isolated() if packed else True
    trainer.train()
# Of whole steps: from the first pass of one to the first pass of the next.
passes = arguments.gradient_accumulation_steps
starts = trainer.stamps[::passes]
pairs = list(pairwise(starts))
counts = [sum(trainer.counts[i : i + passes]) for i in range(0, len(trainer.counts), passes)]
print(
    json.dumps(
        {
            "seconds": [after[0] - before[0] for before, after in pairs],
            "processor": [after[1] - before[1] for before, after in pairs],
            "tokens": counts[: len(pairs)],
            "isolated": apart,
        }
    )
)
