"""Registers vLLM."""

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="rollout_engine",
            name="vllm",
            factory="hybridflow.backends.vllm.engine:VLLMEngine",
            config="hybridflow.backends.vllm.config:VLLMConfig",
            capabilities={
                "tp": True, "devices": "cpu, cuda", "abort": True, "sleep": "cuda", "continuous": True,
                "grouping": "consecutive", "verify": False, "process": "either",
            },
            requires=("vllm",),
            diagnosis="hybridflow.backends.vllm.diagnosis:diagnose",
            remedy="pip install 'hybridflow[vllm]' on a machine with GPUs; hybridflow doctor has the line for one without",
        )
    ]  # fmt: skip
