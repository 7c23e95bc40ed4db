"""What every tokenizer must fit, and that the contract imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.sources import char

from hybridflow.core.errors import ModelError


def test_a_tokenizer_that_exceeds_the_models_vocabulary_is_refused():
    char().check(15)
    with pytest.raises(ModelError, match=r"14.*vocab_size = 15"):
        char().check(14)


def test_the_contract_and_the_small_tokenizers_import_nothing_heavy():
    code = (
        "import sys, hybridflow.core.contracts.tokenizer, hybridflow.core.plugins, hybridflow.core.data.rows\n"
        "import hybridflow.backends.tokenizers.small, hybridflow.backends.tokenizers.plugin\n"
        "bad = {'transformers', 'datasets', 'pyarrow', 'tokenizers', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
