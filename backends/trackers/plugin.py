"""Registers the built-in trackers."""

from hybridflow.core.plugins import Descriptor, hookimpl

CONFIGS = "hybridflow.backends.trackers.config"
SERVICES = {
    "wandb": "WandbTracker",
    "mlflow": "MLflowTracker",
    "trackio": "TrackioTracker",
    "swanlab": "SwanLabTracker",
}
"""Trackers of services, named as their packages are."""


@hookimpl
def hybridflow_plugins():
    """Describe the trackers."""
    return [
        Descriptor("tracker", "jsonl", "hybridflow.backends.trackers.jsonl:JsonlTracker"),
        Descriptor(
            "tracker",
            "tensorboard",
            "hybridflow.backends.trackers.tensorboard:TensorBoardTracker",
            config=f"{CONFIGS}:TensorBoardConfig",
            requires=("tensorboard",),
            extra="tensorboard",
        ),
        *(
            Descriptor(
                "tracker",
                name,
                f"hybridflow.backends.trackers.{name}:{tracker}",
                config=f"{CONFIGS}:{tracker.removesuffix('Tracker')}Config",
                requires=(name,),
                extra=name,
            )
            for name, tracker in SERVICES.items()
        ),
    ]
