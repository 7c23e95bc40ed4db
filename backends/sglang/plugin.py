"""Registers SGLang."""

from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the rollout engine "sglang"."""
    return [
        Descriptor(
            kind="rollout_engine",
            name="sglang",
            factory="hybridflow.backends.sglang.engine:SGLangEngine",
            config="hybridflow.backends.sglang.config:SGLangConfig",
            capabilities=EngineCapabilities(
                tp=True,
                process="own",
            ),
            default_on={"cuda": 2},
            requires=("sglang",),
            diagnosis="hybridflow.backends.sglang.diagnosis:diagnose",
            remedy="pip install 'hybridflow[sglang]' on a machine with GPUs; "
            "hybridflow doctor has the line for one without",
        )
    ]
