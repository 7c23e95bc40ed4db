"""What `hybridflow plan` prints of a config."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from helpers.configs import CONFIG
from hybridflow.cli.plan import plan


def ppo_config(folder: Path) -> Path:
    """The file of a config that plans well."""
    path = folder / "ppo.toml"
    path.write_text(CONFIG)
    return path


def printed(*arguments: Any, **options: Any) -> str:
    """Of `plan` with these arguments."""
    out = io.StringIO()
    plan(*arguments, **options, console=Console(file=out, width=200, highlight=False, markup=False))
    return out.getvalue()
