"""Which settings a model card shows."""

from __future__ import annotations

from hybridflow.inference.card import public


def test_places_people_and_secrets_are_left_out():
    tables = {
        "run": {"steps": 3, "folder": "runs", "trackers": ["jsonl", "/some/where"]},
        "runtime": {"name": "ray", "address": "ray:1234"},
        "reward": {
            "function": "mine:score",
            "options": {"api_key": "s3cret", "auth_token": "t", "password": "p"},
        },
        "sampling": {"max_tokens": 4, "stop_tokens": [7]},
        "actor": {"model": {"path": "models/mine"}, "optimizer": {"lr": 1e-3}},
        "data": {"source": "jsonl", "options": {"home": "C:\\me"}, "max_prompt_tokens": 9},
    }
    assert public(tables) == {
        "run.steps": 3,
        "runtime.name": "ray",
        "reward.function": "mine:score",
        "sampling.max_tokens": 4,
        "sampling.stop_tokens": [7],
        "actor.optimizer.lr": 1e-3,
        "data.source": "jsonl",
        "data.max_prompt_tokens": 9,
    }
