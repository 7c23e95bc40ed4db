"""What SGLang's processes are given of ours: seeds of requests, biases that logprobs do not see, and a sampler."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.installed import needs
from helpers.paths import matrix

from hybridflow.backends.sglang.sampler import OURS, _with_seeds, _without_biases, register


def info(**fields):
    """A batch's sampling, as SGLang gives it."""
    return SimpleNamespace(temperatures=torch.ones(2, 1), sampling_seed=None, **fields)


def asked(*seeds):
    """A batch of requests with these seeds."""
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in seeds]
    )


@pytest.mark.parametrize("by_name", [True, False])
def test_every_request_keeps_its_seed_however_the_batch_is_handed_over(by_name):
    def original(*args, **kwargs):
        return info()

    seeds = asked(2**62 + 1, None)
    found = (
        _with_seeds(original, batch=seeds, vocab_size=9)
        if by_name
        else _with_seeds(original, seeds, 9)
    )
    assert (
        found.sampling_seed.tolist() == [2**62 + 1, 0] and found.sampling_seed.dtype == torch.int64
    )


def test_biases_are_kept_from_the_logits_and_come_back():
    def original(batch, logits):
        if batch.logit_bias is not None:
            logits += batch.logit_bias
        if logits.isnan().any():
            raise ValueError("nan")

    bias, logits = torch.full((2, 3), 5.0), torch.zeros(2, 3)
    batch = info(logit_bias=bias)
    _without_biases(original, batch, logits)
    assert not logits.any() and batch.logit_bias is bias
    with pytest.raises(ValueError, match="nan"):
        _without_biases(original, batch, logits * torch.nan)
    assert batch.logit_bias is bias


def test_an_sglang_that_is_not_ours_is_left_alone(monkeypatch):
    monkeypatch.delenv(OURS, raising=False)
    before = set(sys.modules)
    register()
    assert not {name for name in set(sys.modules) - before if name.startswith("sglang")}


REGISTERED = f"""
import os
from importlib.metadata import entry_points
from hybridflow.backends.sglang import shims
import torch
os.environ.update(shims.variables(torch.device("cpu")))
[point] = [p for p in entry_points(group="sglang.srt.plugins") if p.name == "hybridflow"]
point.load()()
from sglang.srt.layers import sampler
from sglang.srt.plugins.hook_registry import HookRegistry
print(list(sampler._CUSTOM_SAMPLER_FACTORIES), sorted(HookRegistry._hooks), os.environ[{OURS!r}])
"""


@needs("sglang")
@matrix
def test_ours_is_the_sampler_that_a_cpu_may_have():
    from hybridflow.backends.sglang import shims

    environment = {"PATH": "", **shims.variables(torch.device("cpu"))}
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    hooks = [f"{batch}.apply_logits_bias", f"{batch}.from_schedule_batch"]
    assert done.stdout.splitlines()[-1] == f"['pytorch'] {hooks} 1"
