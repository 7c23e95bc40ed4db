"""Registers SGLang."""

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="rollout_engine",
            name="sglang",
            factory="hybridflow.backends.sglang.engine:SGLangEngine",
            config="hybridflow.backends.sglang.config:SGLangConfig",
            capabilities={
                "tp": True, "devices": "cpu, cuda", "abort": True, "sleep": "cuda", "continuous": True, "inflight": True,
                "grouping": "consecutive", "verify": False, "process": "own",
            },
            requires=("sglang",),
            diagnosis="hybridflow.backends.sglang.diagnosis:diagnose",
            remedy="pip install 'hybridflow[sglang]' on a machine with GPUs; hybridflow doctor has the line for one without",
        )
    ]  # fmt: skip
