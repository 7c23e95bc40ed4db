"""docs/configuration.md: its reference is of the config classes as they are, its examples are configurations."""

from __future__ import annotations

import importlib.util
import re
import tomllib

import pytest
from helpers.paths import DOCS

from hybridflow.core.config import expand, merge
from hybridflow.core.job.resolve import resolve_jobs
from hybridflow.core.job.schema import SHORTHAND

PAGE = (DOCS / "configuration.md").read_text()
EXAMPLES = re.findall(r"^<!-- toml: small\.toml -->\n```toml\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == PAGE, "docs/configuration.md is stale: run python docs/make_reference.py"


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_an_example_laid_over_the_small_file_is_a_configuration(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [small] = re.findall(r"^<!-- file: small\.toml -->\n```toml\n(.*?)^```$", PAGE, re.M | re.S)
    tables = merge(tomllib.loads(small), tomllib.loads(example), SHORTHAND)
    if "stages" in tables:
        del tables["algorithm"]
    assert resolve_jobs(expand(tables, SHORTHAND), "small", SHORTHAND)
