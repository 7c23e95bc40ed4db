"""An engine is hosted where its settings say so."""

from __future__ import annotations

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import one_rank, tiny_config

MODEL = ModelSpec(tiny_config(), None, 0)


def build(tmp_path, **settings):
    with one_rank(role="actor") as context:
        config = TransformersEngineConfig(**settings)
        return TransformersEngine.build(MODEL, config, context, str(tmp_path))


def test_in_a_process_of_its_own_it_logs_into_the_folder(tmp_path):
    engine = build(tmp_path, own_process=True, restarts=2)
    assert isinstance(engine, HostedEngine) and engine.engine_class is TransformersEngine
    assert engine.logs == tmp_path / "engine-actor-0.log"
    assert engine.process_config.restarts == 2 and engine.inflight == TransformersEngine.inflight
    assert engine.process is None  # until it is started


def test_otherwise_it_is_itself(tmp_path):
    engine = build(tmp_path)
    assert type(engine) is TransformersEngine and engine.model is MODEL
    assert list(tmp_path.iterdir()) == []
