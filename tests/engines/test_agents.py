"""Three agents by clients of others, as they are, with engines in processes of their own."""

from __future__ import annotations

import pytest
from helpers.clients import three_agents

ENGINES = {
    "vllm": {"name": "vllm", "kv_memory_gb": 0.1},
    "sglang": {"name": "sglang", "kv_tokens": 16384},
}
WIDER = {"hidden_size": 128}  # heads of 32, the least that vLLM takes on a CPU


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ENGINES)
def test_agents_of_three_clients_are_trained_on_what_was_sampled(tmp_path, name):
    pytest.importorskip(name)
    turns, sequences = three_agents(tmp_path, ENGINES[name], WIDER)
    assert turns > 90 and sequences > 60
