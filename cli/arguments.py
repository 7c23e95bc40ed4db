"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def add_config(
    parser: argparse.ArgumentParser, required: bool = True, example: str = "actor.optimizer.lr=1e-5"
) -> None:
    """Add the arguments of a command that reads a config: its file, and overrides of its keys."""
    if required:
        parser.add_argument("config", help="a TOML file")
    else:
        parser.add_argument("config", nargs="?", help="a TOML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help=f"for example {example}"
    )
