"""Engines by name, and how long they may take to start."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.errors import ModelError, PluginError
from hybridflow.core.rollouts.build import build_engine, start_engine
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import one_rank, tiny_config

MODEL = ModelSpec(tiny_config("llama"), None, 0)
SLOW = """
import time
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.rollouts.build import start_engine

class Slow(TransformersEngine):
    def start(self):
        time.sleep(60)

start_engine(Slow(None, TransformersEngineConfig(start_timeout_s=0.2), type("Context", (), {"device": "cpu"})))
"""


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


def deadlines() -> list[threading.Timer]:
    """Those that still run."""
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in timers if not timer.finished.is_set()]


def test_an_engine_is_built_by_name_and_started_in_this_process(context):
    engine = build_engine(
        "transformers", MODEL, TransformersEngineConfig(start_timeout_s=60), context
    )
    assert type(engine) is TransformersEngine
    assert engine.decoder is None
    start_engine(engine)
    assert engine.layout().params["model.embed_tokens.weight"].shape == (32, 32)
    assert deadlines() == []


def test_one_that_asks_for_a_process_gets_one(context, tmp_path):
    engine = build_engine(
        "transformers", MODEL, TransformersEngineConfig(own_process=True), context, str(tmp_path)
    )
    assert type(engine) is HostedEngine
    engine.close()


def test_a_name_that_is_none_is_told_with_a_near_one(context):
    with pytest.raises(PluginError, match="transformers"):
        build_engine("transformer", MODEL, TransformersEngineConfig(), context)


def test_an_engine_that_cannot_start_says_so_and_is_not_waited_for(context):
    config = TransformersEngineConfig(start_timeout_s=60)
    engine = build_engine(
        "transformers", ModelSpec(tiny_config("llama"), None, 0, "value"), config, context
    )
    with pytest.raises(ModelError):
        start_engine(engine)
    assert deadlines() == []


def test_a_process_whose_engine_hangs_ends_with_the_stacks():
    ran = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "Slow did not start within 0 s (rollout.start_timeout_s): its process ends" in ran.stderr
    assert "in start" in ran.stderr
