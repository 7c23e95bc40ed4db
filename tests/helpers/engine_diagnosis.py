"""What the doctor is asked of every engine that comes as a package, on machines that stand in for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from helpers.installed import stand_in
from hybridflow.core.names import is_installed
from hybridflow.kit.diagnosis import Row

VERSION = "0.30.1"


class StandIns:
    """Subclass it with the question, the package, and the lines to type. Skipped where the real package would be found."""

    diagnose: Callable[[], Iterator[Row]]
    package: str
    on_cpu: str
    on_gpu: str

    @pytest.fixture
    def machine(self, tmp_path, monkeypatch):
        """machine(gpu, *packages, files=...): one with these distributions and these modules."""
        if is_installed(self.package):
            pytest.skip("the real one is found beside the stand-in")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        def make(gpu: bool, *packages: str, files: Mapping[str, str]) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
            for package in packages:
                stand_in(tmp_path, package, VERSION, files)

        return make

    @pytest.mark.parametrize("gpu", [False, True])
    def test_where_there_is_none_the_line_for_the_machine_is_given(self, machine, gpu):
        machine(gpu, files={})
        line = self.on_gpu if gpu else self.on_cpu
        assert list(type(self).diagnose()) == [("package", "not installed", line)]
