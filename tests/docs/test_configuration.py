"""docs/configuration.md: its examples are configurations."""

from __future__ import annotations

import re
import tomllib

import pytest
from helpers.paths import DOCS

from hybridflow.settle.config.load import expand, merge
from hybridflow.settle.resolve import resolve_jobs

PAGE = (DOCS / "configuration.md").read_text()
EXAMPLES = re.findall(r"^<!-- toml: small\.toml -->\n```toml\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_an_example_laid_over_the_small_file_is_a_configuration(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [small] = re.findall(r"^<!-- file: small\.toml -->\n```toml\n(.*?)^```$", PAGE, re.M | re.S)
    tables = merge(expand(tomllib.loads(small)), expand(tomllib.loads(example)))
    if "stages" in tables:
        del tables["algorithm"]
    assert resolve_jobs(expand(tables), "small")
