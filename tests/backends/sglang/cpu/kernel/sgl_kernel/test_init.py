"""The stand-in for SGLang's kernels: any name can be imported, none can be called."""

from __future__ import annotations

import importlib
import sys

import pytest

from hybridflow.backends.sglang.shims import FOLDER


@pytest.fixture
def sgl_kernel(monkeypatch):
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    monkeypatch.syspath_prepend(str(FOLDER / "kernel"))
    yield importlib.import_module("sgl_kernel")
    sys.modules.pop("sgl_kernel", None)


def test_a_kernel_can_be_imported_and_not_called(sgl_kernel):
    from sgl_kernel import top_k_renorm_prob

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.top_k_renorm_prob"):
        top_k_renorm_prob([1.0], k=1)


def test_what_python_itself_looks_for_is_not_there(sgl_kernel):
    assert not hasattr(sgl_kernel, "__all__") and not hasattr(sgl_kernel, "__wrapped__")
    assert sgl_kernel.__version__ == "0.0.0"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sgl_kernel.flash_attn")
