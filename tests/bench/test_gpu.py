"""The benchmarks of a GPU run on the CPU with a tiny model (--mini), in this process, and meet the bars that hold there."""

from __future__ import annotations

import importlib
import json

import pytest
from helpers.paths import ROOT, matrix


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.fixture
def lines(capfd):
    """lines(script) -> name -> line, of a mini run that met its bars."""

    def lines(script: str) -> dict[str, dict]:
        assert importlib.import_module(script).main(["--mini"]) == 0
        out = capfd.readouterr().out
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return {line["name"]: line for line in found}

    return lines


def test_a_step_is_taken_apart(lines):
    found = lines("gpu_step")
    updates = [name for name in found if name.startswith("mini: update, ") and "peak" not in name]
    assert len(updates) == 4 and all(found[name]["value"] > 0 for name in updates)
    for part in ("generation", "update"):
        shares = [found[name]["value"] for name in found if name.startswith(f"mini: {part}: cost")]
        assert len(shares) == 5 and shares == sorted(shares, reverse=True) and sum(shares) <= 1
    assert found["mini: generation inside a step"]["ratio"] > 0
    assert found["mini: mismatch of engine and trainer"]["met"]


def test_operations_are_counted_by_hand():
    """One layer of hidden 4 with 2 heads of which 1 for keys, MLP 8; vocabulary 10; two responses of 3 tokens to one prompt."""
    step = importlib.import_module("gpu_step")
    fields = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 10}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # q and o 4 x 4, k and v 4 x 2, three products of the MLP 4 x 8; a prompt of 7 tokens once; the head for 6 tokens
    products = 2 * 16 + 2 * 8 + 3 * 32
    # Scores and values: 2 products of 2 x 4 operations a pair forward, twice as many backward, half the pairs of 3 x 3
    attention = 2 * (3 * 2 * 2 * 4) * 9 / 2
    assert step.flops(fields | heads, [3, 3], 2) == 6 * (products * 13 + 40 * 6) + attention


@matrix
def test_weights_move_and_stay_equal(lines):
    found = lines("gpu_sync")
    differ = [name for name in found if name.endswith("parameters that differ")]
    assert len(differ) == 2 and all(found[name]["met"] for name in differ)
    assert found["parameters that moving has changed"]["met"]


@matrix
def test_runs_repeat_their_bits(lines):
    found = lines("gpu_determinism")
    for name in ("again", "resumed"):
        assert found[f"{name}: tensors of 50 that differ"]["met"]
        assert found[f"{name}: metrics that differ"]["met"]
