"""Weights that did not arrive as they were sent, and a cache of old ones: each ends the run before a step trains on it."""

from __future__ import annotations

import pytest
from helpers.paths import matrix
from helpers.planted import plant
from helpers.tiny import GRPO, hybridflow, metrics, write

RECEIVE = "    def receive(self, name, box, tensor):\n"
WRONG_NAME = (
    RECEIVE
    + """\
        other = {"gate": "up", "up": "gate"}
        for one, two in other.items():
            if f".1.mlp.{one}_proj" in name:
                return super().receive(name.replace(f"{one}_proj", f"{two}_proj"), box, tensor)
        super().receive(name, box, tensor)
"""
)
WRONG_EXPERTS = (
    RECEIVE
    + """\
        for one, two in (("experts.0.", "experts.1."), ("experts.1.", "experts.0.")):
            if one in name:
                return super().receive(name.replace(one, two), box, tensor)
        super().receive(name, box, tensor)
"""
)
HALF_A_WINDOW = (
    RECEIVE
    + """\
        if name.endswith("1.self_attn.q_proj.weight"):
            tensor = tensor.clone()
            tensor[len(tensor) // 2 :] = 0.0
        super().receive(name, box, tensor)
"""
)
LOST = (
    RECEIVE
    + """\
        if name != "model.layers.0.post_attention_layernorm.weight" or self._next_version < 1:
            super().receive(name, box, tensor)
"""
)
STALE = """\
    def submit(self, requests):
        # Answers to prompts that it has seen before, whatever the weights are now
        known = self.__dict__.setdefault("known", {})
        for done in super().submit(requests):
            request = next(one for one in requests if one.id == done.id)
            key = (*request.prompt_ids.tolist(), request.id % 4)
            first = known.setdefault(key, done)
            versions = np.full(len(first.response_ids), self.version, np.int64)
            yield attrs.evolve(first, id=done.id, weight_version=versions)
"""
OLD_STAMPED_NEW = """\
    def receive(self, name, box, tensor):
        if self._next_version < 1:
            return super().receive(name, box, tensor)
        # It shows what it was sent, and speaks with what it had.
        self.store.arrived.note(name, box)
        self.__dict__.setdefault("sent", {})[name] = (box, tensor.clone())

    def read(self, name, box):
        own, sent = self.__dict__.get("sent", {}).get(name, (None, None))
        return super().read(name, box) if own is None else sent[box.within(own)]
"""
SWAPPED_BY_THE_TRAINER = """\
    from hybridflow.backends.fsdp.config import FSDPConfig as Config

    def named_shards(self):
        other = {"experts.0.": "experts.1.", "experts.1.": "experts.0."}
        for name, box, shard in super().named_shards():
            for one in (key for key in other if key in name):
                name = name.replace(one, other[one])
                break
            yield name, box, shard
"""
FOUR_PROMPTS = ("data.options.rows=4", "actor.optimizer.lr=0.01")
MOE = """{ model_type = "qwen3_moe", vocab_size = 16, hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 4, \
num_key_value_heads = 2, head_dim = 8, intermediate_size = 64, moe_intermediate_size = 32, num_experts = 4, \
num_experts_per_tok = 2, decoder_sparse_step = 1, norm_topk_prob = true, max_position_embeddings = 32, \
tie_word_embeddings = false }"""

PROBE = "step 2: logprobs of the rollout engine and of the trainer, of 64 tokens made by the weights after step 1"
AHEAD = [
    "pools={main=[1], engines=[1]}",
    "actor.generation.pool=engines",
    "run.max_staleness=1",
    "algorithm.correction=mask",
]
AGREE = "= 0.001; no weights have changed; the checksums of all"


@pytest.mark.parametrize(
    ("fault", "steps", "told"),
    [
        (WRONG_NAME, 0, ("weights of version 0: 2 parameters differ", "layers.1.mlp.", "has other values")),
        pytest.param(WRONG_EXPERTS, 0, ("weights of version 0:", "experts.", "has other values"), marks=matrix),
        pytest.param(HALF_A_WINDOW, 0, ("version 0: 1 parameters differ", "1.self_attn.q_proj.weight (rank 0 has other"),
                     marks=matrix),
        pytest.param(LOST, 1, ("version 1: 1 parameters differ", "0.post_attention_layernorm.weight (rank 0 has that of an"),
                     marks=matrix),
        (STALE, 1, ("step 2: an update after 1 steps:", AGREE)),
        pytest.param(OLD_STAMPED_NEW, 1, ("step 2: an update after 1 steps:", AGREE), marks=matrix),
        pytest.param(SWAPPED_BY_THE_TRAINER, 0, ("step 1: an update after 0 steps:", AGREE), marks=matrix),
        (OLD_STAMPED_NEW, 1, (PROBE, "= 0.001; the checksums of all")),
        pytest.param(STALE, 1, (PROBE, "= 0.001; the checksums of all"), marks=matrix),
    ],
    ids=[
        "wrong name", "wrong expert order", "half a window", "lost version", "stale cache", "old stamped new",
        "experts swapped in the trainer's saved form", "old stamped new, a step ahead", "stale cache, a step ahead",
    ],
)  # fmt: skip
def test_a_planted_fault_ends_the_run_before_a_step_trains_on_it(
    tmp_path, monkeypatch, fault, steps, told
):
    side, where = "transformers", "rollout"
    if fault == SWAPPED_BY_THE_TRAINER:
        side, where = "fsdp", "actor.backend"
    for name, value in plant(tmp_path, side, fault).items():
        monkeypatch.setenv(name, value)
    text = GRPO
    if "experts" in fault:
        head, _, tail = GRPO.partition("model.config = ")
        text = f"{head}model.config = {MOE}\n{tail.partition(chr(10))[2]}"
    write(tmp_path, text, **{"mini_batch_size = 8": "mini_batch_size = 16"})
    # The same four prompts at each step, and one update of weights that is large enough to be seen
    settings = [f"{where}.name=faulty", "run.steps=3", "actor.sync.alias=false", *FOUR_PROMPTS]
    if PROBE in told:
        settings += AHEAD
    done = hybridflow(tmp_path, "run", "tiny.toml", *settings)
    assert done.returncode == 1, done.stdout + done.stderr
    for text in told:
        assert text in done.stderr, done.stderr
    file = tmp_path / "runs/tiny/metrics.jsonl"
    assert (len(metrics(file.parent)) if file.exists() else 0) == steps
