"""The contract of commands: a subcommand of `hybridflow`."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from typing import ClassVar

from hybridflow.core.contracts.capabilities import CommandCapabilities


class Command(ABC):
    """A plugin of kind "command": `hybridflow NAME` runs it."""

    capabilities: ClassVar[CommandCapabilities] = CommandCapabilities()
    """Capabilities of a plugin that is registered in one line; a Descriptor has its own. Their
    summary is the command's help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027
        """Declare options and positional arguments.

        A positional named `overrides` takes key=value texts at any position.
        """

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit status.

        A HybridFlowError that it raises is printed, and the status is then 1.
        """
