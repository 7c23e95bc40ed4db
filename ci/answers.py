"""Asks an exported model of the demo for sums, by transformers alone: most are right, and every answer ends by itself.

    python ci/answers.py runs/arithmetic/grpo/export/actor

It exits 1 where fewer than nine of ten (or the share --right) are right, or one goes on.
"""

from __future__ import annotations

import argparse
import random
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

SUMS = 100
RIGHT = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--right", type=float, default=RIGHT)
    arguments = parser.parse_args()
    folder = arguments.folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    random.seed(0)
    pairs = [(12, 34), *((random.randrange(100), random.randrange(100)) for _ in range(SUMS - 1))]
    prompts = [f"{a:02d}+{b:02d}=" for a, b in pairs]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    # More tokens than an answer has, so that it must end by itself.
    answers = model.generate(**batch, max_new_tokens=16, do_sample=False)
    answers = answers[:, batch["input_ids"].shape[1] :]

    ended = sum(tokenizer.eos_token_id in answer for answer in answers)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = sum(text == f"{a + b:03d}" for text, (a, b) in zip(texts, pairs, strict=True))
    print(f"12+34={texts[0]}; {right} of {SUMS} sums are right, {ended} answers end")
    return 0 if ended == SUMS and right >= arguments.right * SUMS else 1


if __name__ == "__main__":
    sys.exit(main())
