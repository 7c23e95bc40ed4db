"""`hybridflow new`: a package of one's own that passes its tests as it is."""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path
from string import Template

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
KINDS = {
    "algorithm": 'algorithm = "$name"',
    "training_backend": 'actor.backend = "$name"',
    "rollout_engine": 'rollout = "$name"',
    "reward": 'reward.function = "$name"',
    "environment": 'environment.name = "$name"',
    "tracker": 'run.trackers = ["$name"]',
    "command": "hybridflow $name",
}
"""Kind of plugin -> how it is used once it is installed."""


class NewCommand(Command):
    """A plugin of kind "command", name "new"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", choices=tuple(KINDS), help="what it brings")
        parser.add_argument("name", help="its name, and its module's: my_grpo")

    def run(self, arguments: argparse.Namespace) -> int:
        kind, name = arguments.kind, arguments.name
        for file in new_package(kind, name, Path()):
            print(f"wrote {file}")
        use = Template(KINDS[kind]).substitute(name=name)
        print(
            f"\ncd {name}\npython -m pytest     # it passes as it is\npip install -e .      # then: {use}"
        )
        return 0


def new_package(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the package `name` into `folder`/`name`; its files. Raises ConfigError, and writes nothing, when the name is no
    module's or the folder is there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"new {kind}: {name!r} must be a module's name: lower-case letters, digits and _, such as my_grpo"
        )
    target = folder / name
    if target.exists():
        raise ConfigError(
            f"new {kind}: {str(target)!r} is there already; choose another name, or remove it"
        )
    words = {
        "kind": kind,
        "name": name,
        "dashed": name.replace("_", "-"),
        "cls": "".join(word.capitalize() for word in name.split("_")),
    }
    files = {
        "pyproject.toml": TEMPLATES / "pyproject.toml.tmpl",
        f"{name}.py": TEMPLATES / kind / "module.py.tmpl",
        f"test_{name}.py": TEMPLATES / kind / "test.py.tmpl",
    }
    target.mkdir(parents=True)
    for file, template in files.items():
        (target / file).write_text(Template(template.read_text()).substitute(words))
    return [target / file for file in files]
