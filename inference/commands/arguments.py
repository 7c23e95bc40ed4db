"""Arguments that several commands share: which model, and settings."""

from __future__ import annotations

import argparse


def add_model(parser: argparse.ArgumentParser, example: str, engine: bool = True) -> None:
    """Add the arguments that select the model and its engine, and override settings."""
    parser.add_argument("model", help="a run's folder, its stage's, or a Hugging Face folder")
    parser.add_argument("--step", type=int, help="the run's checkpoint of this step")
    parser.add_argument("--stage", help="the run's stage; default: the last one")
    parser.add_argument("--role", default="actor", help="the trained role; default: actor")
    if engine:
        parser.add_argument("--engine", help="rollout engine; default: the run's")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help=f"for example {example}"
    )
