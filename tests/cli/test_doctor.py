"""`hybridflow doctor`: what it tells of the machine, packages and plugins; and when it ends with 1."""

from __future__ import annotations

import os
import re
import sys

import torch
from helpers.configs import console

from hybridflow.cli import doctor
from hybridflow.core.plugins import Descriptor, Registry


def told() -> tuple[int, str]:
    """The status that it ends with, and what it prints."""
    to, out = console()
    status = doctor.doctor(to)
    return status, out.getvalue()


def diagnosed() -> list[tuple[str, str, str]]:
    """A diagnosis."""
    return [("driver", "12.4", "")]


def test_it_says_what_is_here_and_ends_with_0():
    status, text = told()
    assert status == 0
    for said in ("python", "cores", "memory", "/dev/shm", "collectives", "transformers", "fsdp"):
        assert said in text, said
    assert "hybridflow can run here" in text
    assert re.search(r"runtime +ray +(ready|missing)", text)


def test_the_machine_is_told_as_the_system_tells_it():
    found = dict(doctor.machine())
    assert found["python"].endswith(f"({sys.executable})")
    assert found["cores"].startswith(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    assert found["memory"].startswith(f"{memory:.1f} GB, ")
    assert found["disk here"].endswith(f"free in {os.getcwd()}")


def test_plugins_are_imported_to_see_whether_they_load(broken):
    states = {name: (state, remedy) for _, name, state, remedy in doctor.plugin_states()}
    assert states["raising"] == ("failed", "see below")
    status, text = told()
    assert status == 0  # the core itself can run
    assert "No module named 'no_such_module'" in text and "no runtime is ready" in text


def test_it_ends_with_1_when_the_core_cannot_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, text = told()
    assert status == 1
    assert "hybridflow cannot run here: torch cannot be imported" in text


def test_torch_is_told_with_its_threads_and_collectives():
    problems: list[str] = []
    found = dict(doctor.torchstate_of(problems))
    assert found["version"] == f"{torch.__version__}, {torch.get_num_threads()} threads"
    assert found["collectives"].startswith("gloo") and not problems


def test_a_package_of_another_version_is_pointed_out(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.0.1" if name == "rich" else None)
    found = {name: (have, want) for name, have, want, _ in doctor.packages()}
    assert found["rich"][0] == "0.0.1" and "13.7" in found["rich"][1]
    assert found["ray"] == ("", "") and "pytest" not in found


def test_a_diagnosis_that_raises_is_told_and_the_others_are_there(broken):
    one = Descriptor("tracker", "good", "a:B", diagnosis=f"{__name__}:diagnosed")
    broken.add(one, "acme", "1.0")
    broken.add(
        Descriptor("tracker", "bad", "a:B", diagnosis=f"{__name__}:no_such_function"), "acme", "1.0"
    )
    found = dict(doctor.diagnoses())
    assert found["tracker good"] == [("driver", "12.4", "")]
    [(what, said, remedy)] = found["tracker bad"]
    assert what == "diagnosis" and said.startswith("failed: ") and "no_such_function" in said
    assert remedy == "tell its author"


def test_kinds_that_a_run_needs_and_has_not_are_named(monkeypatch):
    found = Registry()
    found.add(Descriptor("algorithm", "here", "hybridflow.algorithms.grpo:GRPO"), "acme", "1.0")
    found.add(Descriptor("runtime", "away", "a:B", requires=("no_such_module",)), "acme", "1.0")
    monkeypatch.setattr(doctor, "registry", lambda: found)
    assert doctor.missing_kinds() == ["runtime", "training_backend"]
