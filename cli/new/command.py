"""`hybridflow new`: writes a package with a plugin, which passes its tests as it is."""

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
"""Kind of plugin -> the setting or the command that uses it once it is installed."""


class NewCommand(Command):
    """Writes a package for a new plugin, with tests that pass."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", choices=tuple(KINDS), help="what it brings")
        parser.add_argument("name", help="its name, and its module's: my_grpo")

    def run(self, arguments: argparse.Namespace) -> int:
        kind = arguments.kind
        name = arguments.name
        for file in new_package(kind, name, Path()):
            print(f"wrote {file}")

        use = Template(KINDS[kind]).substitute(name=name)
        print(f"\ncd {folder_name(name)}")
        print("python -m pytest     # it passes as it is")
        print(f"pip install -e .      # then: {use}")
        return 0


def folder_name(name: str) -> str:
    """Return the name of a plugin's folder, which is no module's name and so hides none."""
    return f"hybridflow-{name.replace('_', '-')}"


def new_package(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the package of the plugin `name` into a new folder in `folder`; return its files.

    Raises ConfigError, and writes nothing, where the name is not valid for a module or the folder
    exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"new {kind}: {name!r} must be a module's name: lower-case letters, digits and _, "
            "such as my_grpo"
        )
    # Nothing is overwritten.
    target = folder / folder_name(name)
    if target.exists():
        raise ConfigError(
            f"new {kind}: {str(target)!r} is there already; choose another name, or remove it"
        )

    # The values of the templates' placeholders, and the files that the templates become.
    words = {
        "kind": kind,
        "name": name,
        "dashed": name.replace("_", "-"),
        "cls": "".join(word.capitalize() for word in name.split("_")),
    }
    files = {
        "pyproject.toml": TEMPLATES / "pyproject.toml.tmpl",
        f"src/{name}.py": TEMPLATES / kind / "module.py.tmpl",
        f"tests/test_{name}.py": TEMPLATES / kind / "test.py.tmpl",
    }
    for file, template in files.items():
        text = Template(template.read_text()).substitute(words)
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_text(text)
    return [target / file for file in files]
