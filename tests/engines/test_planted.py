"""A lost version and a cache of old keys and values, planted in vLLM and SGLang: each ends the run before it trains."""

from __future__ import annotations

import pytest
from helpers.paths import matrix
from helpers.planted import plant
from helpers.tiny import GRPO, hybridflow, metrics, write

NORM = "model.layers.0.post_attention_layernorm.weight"
LOST = {
    "vllm": f"""\
    def receive(self, name, box, tensor):
        if name != "{NORM}" or self._next_version < 1:
            super().receive(name, box, tensor)
""",
    "sglang": f"""\
    def take(self, place, reader, load):
        kept = tuple(piece for piece in load.pieces if piece.name != "{NORM}" or self._next_version < 1)
        return super().take(place, reader, attrs.evolve(load, pieces=kept))
""",
}
STALE = {
    "vllm": """\
    def start(self):
        super().start()
        self.engine.reset_prefix_cache = lambda **given: True
""",
    "sglang": """\
    def start(self):
        super().start()
        tell = self.schedulers.tell
        self.schedulers.tell = lambda jobs, flush_cache=False: tell(jobs)
""",
}
SETTINGS = {
    "vllm": ["rollout.kv_memory_gb=0.05", "rollout.engine_args.block_size=32"],
    "sglang": ["rollout.kv_tokens=4096"],
}
SETTINGS["vllm hosted"] = [*SETTINGS["vllm"], "rollout.own_process=true"]


def planted(folder, monkeypatch, engine, fault):
    """A run of three steps with the same four prompts; the steps that were made, and what was said."""
    name = engine.split()[0]
    for variable, value in plant(folder, name, fault[name]).items():
        monkeypatch.setenv(variable, value)
    # Prompts longer than a block of cached keys and values; heads of 32, the least that vLLM takes
    changed = {
        "hidden_size = 64": "hidden_size = 128",
        "max_position_embeddings = 32": "max_position_embeddings = 128",
        "max_prompt_tokens = 8": 'max_prompt_tokens = 64\nprompt = "0123456789+=0123456789+=0123456789+={prompt}"',
        "mini_batch_size = 8": "mini_batch_size = 16",
    }
    write(folder, GRPO, **changed)
    run = ["rollout.name=faulty", "run.steps=3", "data.options.rows=4", "actor.optimizer.lr=0.01"]
    done = hybridflow(folder, "run", "tiny.toml", *run, *SETTINGS[engine], timeout=500)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (folder / "runs/tiny/metrics.jsonl").exists(), done.stderr
    return len(metrics(folder / "runs/tiny")), done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["vllm hosted", pytest.param("sglang", marks=matrix)])
@matrix
def test_a_parameter_that_the_second_sync_lost_ends_the_run(tmp_path, monkeypatch, engine):
    pytest.importorskip(engine.split()[0])
    steps, said = planted(tmp_path, monkeypatch, engine, LOST)
    assert steps == 1
    assert "version 1: 1 parameters differ" in said
    assert f"the first is {NORM} (rank 0 has that of an earlier version)" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=matrix)])
def test_keys_and_values_of_old_weights_end_the_run(tmp_path, monkeypatch, engine):
    pytest.importorskip(engine)
    steps, said = planted(tmp_path, monkeypatch, engine, STALE)
    assert steps == 1
    assert "step 2: an update after 1 steps: logprobs of the rollout engine" in said
    assert "the checksums of all weights that can be read back agree" in said
