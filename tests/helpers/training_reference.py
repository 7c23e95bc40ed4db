"""Tiny Hugging Face models, batches, losses, and what single-process Hugging Face makes of them, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.settle.models import resolve_model

MODELS = {
    "qwen2-tied": ("qwen2", True, 68),
    "qwen2": ("qwen2", False, 68),
    "llama": ("llama", False, 68),
    "llama-tied": ("llama", True, 68),
    "qwen2-odd": ("qwen2", True, 67),  # a vocabulary that no number of ranks divides
    "llama-odd": ("llama", False, 67),
    "qwen2-deep": ("qwen2", True, 67),  # four layers, which pipelines divide
    "llama-deep": ("llama", False, 67),
    "qwen2-wide": ("qwen2", True, 67),  # heads of 32, the least that vLLM takes on a CPU
}


def write_model(path: Path, name: str, kind: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    model_type, tied, vocab = MODELS[name]
    config = AutoConfig.for_model(
        model_type, vocab_size=vocab, hidden_size=128 if "wide" in name else 64, intermediate_size=176, num_attention_heads=4,
        num_hidden_layers=4 if "deep" in name else 2,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    if kind != "policy":
        config.num_labels = 1
    torch.manual_seed(1)
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    model = auto.from_config(config)
    with torch.no_grad():  # biases and norms that do something
        for parameter_name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (1.0 if "norm" in parameter_name else 0.0))
    model.save_pretrained(path)
    return str(path)


def spec_of(path: str, kind: str = "policy") -> ModelSpec:
    return resolve_model(ModelConfig(path=path), kind, "actor")


def load(path: str, kind: str = "policy") -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.set_num_threads(1)  # tiny models
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def make_batch(rows: int, seed: int = 0, vocab: int = 67) -> Batch:
    """Prompts of 1 to 6 and responses of 0 to 9 tokens; pairs and groups of neighbouring rows; masks with holes."""
    rng = np.random.default_rng(seed)
    prompt, response = rng.integers(1, 7, rows), rng.integers(0, 10, rows)
    response[: min(2, rows)] = 5
    if rows > 3:
        response[3] = 0

    def per_token(make, dtype):
        return tokens([make(n) for n in response], dtype)

    return Batch(
        {
            "prompt_ids": tokens([rng.integers(1, vocab, n) for n in prompt], torch.int32),
            "response_ids": per_token(lambda n: rng.integers(1, vocab, n), torch.int32),
            "loss_mask": per_token(lambda n: rng.random(n) < 0.8, torch.uint8),
            "advantages": per_token(rng.standard_normal, torch.float32),
            "rollout_logprobs": per_token(lambda n: -rng.random(n) * 4, torch.float32),
            "weight_version": per_token(lambda n: rng.integers(0, 2, n), torch.int32),
            "topk_ids": per_token(lambda n: rng.integers(0, vocab, (n, 3)), torch.int32),
            "returns": torch.from_numpy(rng.standard_normal(rows).astype(np.float32)),
            "pair": torch.arange(rows) // 2,
            "group": torch.arange(rows) % 3,
            "meta": [{"row": i} for i in range(rows)],
        }
    )


class Blend(Loss):
    """Every reduction, a narrower mask, two figures and a maximum in one loss."""

    reads, needs = ("advantages", "meta"), ("logprobs", "entropy")

    def __call__(self, batch, outputs):
        assert len(batch["meta"]) == len(outputs["logprobs"])
        good = batch["loss_mask"] * (batch["advantages"] > 0)
        policy = -outputs["logprobs"] * batch["advantages"]
        return [
            Term("a", policy),
            Term("b", outputs["entropy"], how="seq-mean-token-mean", weight=-0.3),
            Term("c", policy, good, how="seq-mean-token-sum", weight=0.2),
            Term("d", policy.square(), how="seq-mean-token-sum-norm", length=7, weight=0.1),
            Term(
                "e",
                (outputs["logprobs"] * batch["loss_mask"]).sum(-1),
                how="unit-mean",
                weight=0.05,
            ),
            Term("entropy", outputs["entropy"].detach(), weight=0.0),
            Term("largest", outputs["logprobs"], how="max", weight=0.0),
        ]


class ReplayedPPO(Loss):
    """PPO's clipped loss on rollouts that are there already."""

    reads = ("old_logprobs", "advantages")

    def __call__(self, batch, outputs):
        from hybridflow.algorithms.functional import policy_ratio_loss

        value = policy_ratio_loss(
            outputs["logprobs"], batch["old_logprobs"], batch["advantages"], 0.2, 0.2
        )
        return Term("ppo", value)


class PairLoss(Loss):
    """-log sigmoid of the difference of summed logprobs; fails when a pair was split."""

    reads, needs, unit = ("pair",), ("logprobs",), "pair"

    def __call__(self, batch, outputs):
        ids = batch["pair"].unique()
        total = (outputs["logprobs"] * batch["loss_mask"]).sum(-1)
        values = []
        for i in ids:
            mine = total[batch["pair"] == i]
            assert len(mine) == 2, "a pair was split"
            values.append(-torch.nn.functional.logsigmoid(mine[0] - mine[1]))
        return Term("pairs", torch.stack(values), how="unit-mean")


class GroupLoss(Loss):
    """Each row's total against its group's mean."""

    reads, needs, unit = ("group",), ("logprobs",), "group"

    def __call__(self, batch, outputs):
        total = (outputs["logprobs"] * batch["loss_mask"]).sum(-1)
        values = [total[batch["group"] == g].var(unbiased=False) for g in batch["group"].unique()]
        return Term("groups", torch.stack(values), how="unit-mean")


class TopkLoss(Loss):
    reads, needs = (), ("logprobs", "topk_logprobs")

    def __call__(self, batch, outputs):
        return [Term("topk", outputs["topk_logprobs"].sum(-1)), Term("nll", -outputs["logprobs"])]


class ValueLoss(Loss):
    reads, needs = ("advantages",), ("values",)

    def __call__(self, batch, outputs):
        return Term("value", (outputs["values"] - batch["advantages"]).square())


class ScoreLoss(Loss):
    reads, needs = ("returns",), ("scores",)

    def __call__(self, batch, outputs):
        return Term("score", (outputs["scores"] - batch["returns"]).square(), how="unit-mean")


class Nothing(Loss):
    """Figures alone."""

    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"], weight=0.0)


def rows_of(batch: Batch) -> list[dict]:
    """The batch as one dict of unpadded values per row."""
    columns = {name: list(batch[name]) for name in batch}
    return [{name: values[i] for name, values in columns.items()} for i in range(batch.rows)]


def hf_outputs(
    model: torch.nn.Module, row: dict, kind: str, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Of one row alone, no padding: [T, ...] per response token, or `scores` []."""
    ids = torch.cat([row["prompt_ids"], row["response_ids"]]).long()
    start = len(row["prompt_ids"])
    if kind != "policy":
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
        per_state = model.score(hidden)[:, 0]
        return {"values": per_state[start - 1 : len(ids) - 1], "scores": per_state[-1]}
    logits = model(input_ids=ids[None]).logits[0, start - 1 : len(ids) - 1] / temperature
    log_p = logits.log_softmax(-1)
    out = {
        "logprobs": log_p.gather(-1, row["response_ids"].long()[:, None])[:, 0],
        "entropy": torch.distributions.Categorical(logits=logits).entropy()
        if len(logits)
        else logits.sum(-1),
        "topk_logprobs": log_p.gather(-1, row["topk_ids"].long()),
    }
    out["largest_ids"], out["largest_logprobs"] = (
        log_p.topk(3, -1).indices,
        log_p.topk(3, -1).values,
    )
    return out


def hf_loss(
    model: torch.nn.Module, batch: Batch, loss: Loss, kind: str = "policy", temperature: float = 1.0
):
    """(loss with gradients, values of its terms), written out row by row."""
    rows = rows_of(batch)
    outs = [hf_outputs(model, row, kind, temperature) for row in rows]
    masks = [row["loss_mask"].float() for row in rows]
    tokens_, kept = sum(m.sum() for m in masks), [i for i, m in enumerate(masks) if m.sum()]

    def mean(per_row):
        return sum(per_row) / tokens_

    if isinstance(loss, Blend):
        adv = [row["advantages"] for row in rows]
        policy = [-o["logprobs"] * a for o, a in zip(outs, adv, strict=True)]
        total = [(o["logprobs"] * m).sum() for o, m in zip(outs, masks, strict=True)]
        terms = {
            "a": mean([(p * m).sum() for p, m in zip(policy, masks, strict=True)]),
            "b": sum((outs[i]["entropy"] * masks[i]).sum() / masks[i].sum() for i in kept)
            / len(kept),
            "c": sum((p * m * (a > 0)).sum() for p, m, a in zip(policy, masks, adv, strict=True))
            / len(kept),
            "d": sum((p.square() * m).sum() for p, m in zip(policy, masks, strict=True))
            / len(kept)
            / 7,
            "e": sum(total[i] for i in kept) / len(kept),
            "entropy": mean([(o["entropy"] * m).sum() for o, m in zip(outs, masks, strict=True)]),
            "largest": torch.cat(
                [o["logprobs"][m > 0] for o, m in zip(outs, masks, strict=True)]
            ).max(),
        }
        weights = {"a": 1.0, "b": -0.3, "c": 0.2, "d": 0.1, "e": 0.05}
        return sum(w * terms[n] for n, w in weights.items()), terms
    if isinstance(loss, (PairLoss, GroupLoss)):
        units = [int(row[loss.unit]) for row in rows]
        totals = [(o["logprobs"] * m).sum() for o, m in zip(outs, masks, strict=True)]
        values = []
        for unit in sorted({units[i] for i in kept}):
            mine = torch.stack([t for t, u in zip(totals, units, strict=True) if u == unit])
            pair = isinstance(loss, PairLoss)
            values.append(
                -torch.nn.functional.logsigmoid(mine[0] - mine[1])
                if pair
                else mine.var(unbiased=False)
            )
        value = sum(values) / len(values)
        return value, {"pairs" if isinstance(loss, PairLoss) else "groups": value}
    if isinstance(loss, TopkLoss):
        topk = mean(
            [(o["topk_logprobs"].sum(-1) * m).sum() for o, m in zip(outs, masks, strict=True)]
        )
        nll = mean([-(o["logprobs"] * m).sum() for o, m in zip(outs, masks, strict=True)])
        return topk + nll, {"topk": topk, "nll": nll}
    if isinstance(loss, ValueLoss):
        errors = [(o["values"] - r["advantages"]).square() for o, r in zip(outs, rows, strict=True)]
        value = mean([(e * m).sum() for e, m in zip(errors, masks, strict=True)])
        return value, {"value": value}
    assert isinstance(loss, ScoreLoss)
    value = sum((outs[i]["scores"] - rows[i]["returns"]).square() for i in kept) / len(kept)
    return value, {"score": value}
