"""Registers the built-in trackers."""

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    """Describe the trackers."""
    return [
        Descriptor("tracker", "jsonl", "hybridflow.backends.trackers.jsonl:JsonlTracker"),
        Descriptor(
            "tracker",
            "tensorboard",
            "hybridflow.backends.trackers.tensorboard:TensorBoardTracker",
            requires=("tensorboard",),
            extra="tensorboard",
        ),
    ]
