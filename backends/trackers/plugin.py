"""Registers the trackers."""

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor("tracker", "jsonl", "hybridflow.backends.trackers.jsonl:JsonlTracker"),
        Descriptor(
            "tracker", "tensorboard", "hybridflow.backends.trackers.tensorboard:TensorBoardTracker",
            requires=("tensorboard",), extra="tensorboard",
        ),
    ]  # fmt: skip
