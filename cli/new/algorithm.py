"""`hybridflow new`: a package of one's own that passes its tests as it is."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from hybridflow.core.errors import ConfigError

PROJECT = Template("""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "hybridflow-$dashed"
version = "0.1"
dependencies = ["hybridflow"]

[project.entry-points.hybridflow]
"algorithm.$name" = "$name:$cls"

[tool.setuptools]
py-modules = ["$name"]
""")
ALGORITHM = Template('''\
"""$name: what it does, and where it comes from."""

import attrs
from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import PolicyConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient


@attrs.frozen
class ${cls}Config(PolicyConfig):
    """Keys of [algorithm] beside those of every policy-gradient algorithm."""

    group_size: int = 4
    """Responses per prompt."""


class $cls(PolicyGradient):
    Config = ${cls}Config

    def step(self, ctx):
        batch = self.sample(ctx, ctx.prompts(self.config.prompts_per_step))
        self.improve(ctx, batch, ctx.compute(self.advantages, batch))

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):  # parameters are columns
        penalty, figures = self.penalty(loss_mask, old_logprobs, ref_logprobs)
        advantages = F.leave_one_out(scores - penalty.sum(1), group)
        return {"advantages": advantages[:, None] * loss_mask, **figures}
''')
TEST = Template("""\
import pytest
import torch
from hybridflow.kit.testing import AlgorithmConformance
from $name import $cls, ${cls}Config


class Test$cls(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return $cls(${cls}Config(prompts_per_step=4))


def test_advantages_by_hand():
    found = $cls(${cls}Config()).advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 1))
    assert found["advantages"].tolist() == [[1.0], [-1.0]]
""")


def new_algorithm(name: str, folder: Path) -> list[Path]:
    """Write the package `name` into `folder`/`name`; its files. Raises ConfigError, and writes nothing, when the name is no
    module's or the folder is there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"new algorithm: {name!r} must be a module's name: lower-case letters, digits and _, such as my_grpo"
        )
    target = folder / name
    if target.exists():
        raise ConfigError(f"new algorithm: {str(target)!r} is there already; choose another name, or remove it")
    words = {"name": name, "dashed": name.replace("_", "-"), "cls": "".join(w.capitalize() for w in name.split("_"))}
    target.mkdir(parents=True)
    files = {"pyproject.toml": PROJECT, f"{name}.py": ALGORITHM, f"test_{name}.py": TEST}
    for file, template in files.items():
        (target / file).write_text(template.substitute(words))
    return [target / file for file in files]


def run_new(kind: str, name: str) -> None:
    for file in new_algorithm(name, Path()):
        print(f"wrote {file}")
    print(f'\ncd {name}\npython -m pytest     # it passes as it is\npip install -e .      # then: algorithm = "{name}"')
