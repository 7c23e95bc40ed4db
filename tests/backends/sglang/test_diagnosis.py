"""What the doctor says of SGLang: of this machine, and of packages that stand in for those of others."""

from __future__ import annotations

from helpers.engine_diagnosis import StandIns
from helpers.installed import needs
from helpers.paths import matrix

from hybridflow.backends.sglang.diagnosis import ON_CPU, ON_GPU, diagnose


def sources(engine: str) -> dict[str, str]:
    """Of a package whose module `engine` is so."""
    return {"sglang/__init__.py": "", "sglang/srt/entrypoints/engine.py": engine}


class TestOtherMachines(StandIns):
    diagnose, package, on_cpu, on_gpu = diagnose, "sglang", ON_CPU, ON_GPU

    def test_on_a_gpu_no_shims_are_told_of_and_both_imports_are_tried(self, machine):
        machine(True, "sglang", files=sources("raise ImportError('no kernel for this GPU')"))
        package, whole, engine = diagnose()
        assert package == ("package", "sglang 0.30.1", "")
        assert whole[0] == "import sglang" and whole[1].startswith("works") and whole[2] == ""
        assert engine[0] == "import sglang.srt.entrypoints.engine"
        assert engine[1:] == ("fails: ImportError: no kernel for this GPU", ON_GPU)

    def test_on_a_cpu_the_shims_are_named(self, machine):
        machine(False, "sglang", files=sources(""))
        rows = {what: (found, todo) for what, found, todo in diagnose()}
        assert rows["shims"] == (
            "kernel, vision (a CPU needs them; set for the engine's process alone)",
            "",
        )
        assert "sampler" not in rows  # SGLang finds ours


@matrix
@needs("sglang")
def test_the_installed_one_can_be_imported():
    rows = {what: (found, todo) for what, found, todo in diagnose()}
    assert rows["package"][0].startswith("sglang 0.5.") and rows["import sglang"][0].startswith(
        "works"
    )
    assert rows["import sglang.srt.entrypoints.engine"][0].startswith("works")
