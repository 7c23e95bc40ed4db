"""Registers vLLM."""

from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the rollout engine "vllm"."""
    return [
        Descriptor(
            kind="rollout_engine",
            name="vllm",
            factory="hybridflow.backends.vllm.engine:VLLMEngine",
            config="hybridflow.backends.vllm.config:VLLMConfig",
            capabilities=EngineCapabilities(
                tp=True,
                pp=True,
                process="either",
            ),
            default_on={"cuda": 1},
            requires=("vllm",),
            diagnosis="hybridflow.backends.vllm.diagnosis:diagnose",
            remedy="pip install 'hybridflow[vllm]' on a machine with GPUs; "
            "hybridflow doctor has the line for one without",
        )
    ]
