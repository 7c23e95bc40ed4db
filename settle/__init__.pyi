"""What `hybridflow.settle` has at its top."""

from .launch import load_config as load_config, run as run
