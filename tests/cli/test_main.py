"""The command: what it takes, what it prints, how it ends; the listing and the doctor."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT
from rich.console import Console

from hybridflow.cli import doctor, plugins
from hybridflow.cli.main import main
from hybridflow.core.errors import PluginError
from hybridflow.core.plugins import Descriptor, Registry

CONFIG = str(ROOT / "examples/arithmetic.toml")


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "hybridflow.cli.main", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
    )


@pytest.fixture
def path(monkeypatch):
    """sys.path as it is, put back at the end."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return sys.path


def output() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, markup=False, highlight=False, width=100), out


# --- arguments ---


def test_show_prints_and_ends_with_0(capsys, path):
    assert main(["show", CONFIG, "runtime=inline"]) == 0
    assert "stage warm-up" in capsys.readouterr().out


def test_overrides_may_stand_on_both_sides_of_an_option(capsys, path):
    assert main(["show", CONFIG, "runtime=inline", "--docs", "run.seed=77"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"run\.seed +77 +command line", out) and "# Softmax temperature" in out


def test_problems_go_to_stderr_and_the_command_ends_with_1(capsys, path):
    assert main(["show", CONFIG, "runtime=inline", "run.stepz=1", "sampling.top_q=1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "hybridflow: the configuration has 2 problems:" in captured.err


def test_a_missing_file_is_named(capsys, path):
    assert main(["run", "no/such.toml"]) == 1
    assert "no/such.toml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", CONFIG, "--run.steps=3"], "overrides have no dashes: run.steps=3"),
        (["show", CONFIG, "--resume"], "unknown argument --resume"),
        (["plugins", "reward", "more"], "unknown argument more"),
        ([], "COMMAND"),
    ],
)
def test_arguments_that_it_does_not_take_end_with_2(arguments, said, capsys, path):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_resume_and_overwrite_contradict_each_other(capsys, path):
    assert main(["run", CONFIG, "--resume", "--overwrite"]) == 1
    assert "contradict each other" in capsys.readouterr().err


def test_an_override_that_every_stage_replaces_is_refused(capsys, path):
    for name in ("run", "show"):
        assert main([name, CONFIG, "algorithm=ppo"]) == 1
        assert "algorithm.name: given on the command line, and every stage has its own" in capsys.readouterr().err


def test_an_override_of_another_form_is_refused(capsys, path):
    assert main(["show", CONFIG, "run.steps"]) == 1
    assert "there is no '='" in capsys.readouterr().err


def test_the_current_folder_is_searched_last(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    sys.path[:] = [p for p in sys.path if p not in ("", str(tmp_path))]
    main(["plugins", "tracker"])
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def test_a_reader_that_stops_reading_is_no_error():
    piped = f"{sys.executable} -m hybridflow.cli.main plugins --capabilities | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("kind")


def test_every_command_has_its_place_in_the_docs():
    page = (ROOT / "docs/commands.md").read_text()
    listed = re.search(r"\{(.*?)\}|COMMAND\n((?:    \w.*\n|     .*\n)+)", command("--help").stdout)
    assert listed is not None
    names = re.findall(r"^    (\w+) ", command("--help").stdout, re.MULTILINE)
    assert {"run", "show", "plugins", "doctor"} <= set(names)
    for name in names:
        assert f"## hybridflow {name}" in page, name
        for option in re.findall(r"(--[a-z-]+)", command(name, "--help").stdout):
            assert option == "--help" or option in page, (name, option)


# --- plugins ---


def test_plugins_imports_no_torch():
    code = """if True:
        import sys
        from hybridflow.cli.main import main
        assert main(["plugins", "--capabilities"]) == 0
        print([m for m in ("torch", "ray", "transformers", "numpy") if m in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]"), done.stderr
    assert re.search(r"algorithm +grpo +hybridflow +\S+ +ready", done.stdout)
    assert re.search(
        r"training_backend +fsdp +axes: dp, tp; models: policy, score, value; precisions: bf16, fp32", done.stdout
    )


def test_plugins_of_one_kind_and_of_an_unknown_one():
    console, out = output()
    plugins.list_plugins("tracker", console=console)
    assert "jsonl" in out.getvalue() and "grpo" not in out.getvalue()
    with pytest.raises(PluginError, match="did you mean 'reward'"):
        plugins.list_plugins("rewards", console=console)
    console, out = output()
    plugins.list_plugins("environment", console=console)
    assert "there is no plugin of kind environment" in out.getvalue()


@pytest.fixture
def broken(monkeypatch):
    """A registry with a plugin that lacks something, one that does not load, and two of one name."""
    found = Registry()
    found.add(
        Descriptor("reward", "lacking", "a:B", requires=("no_such_module",), remedy="pip install it"), "acme", "1.0"
    )
    found.add(Descriptor("reward", "raising", "no_such_module:B"), "acme", "1.0")
    found.add(Descriptor("reward", "double", "a:B"), "acme", "1.0")
    found.add(Descriptor("reward", "double", "c:D"), "other", "2.0")
    monkeypatch.setattr(doctor, "registry", lambda: found)
    monkeypatch.setattr(plugins, "registry", lambda: found)
    return found


def test_what_is_missing_has_its_remedy_and_what_failed_has_its_reason_below(broken):
    console, out = output()
    plugins.list_plugins(console=console)
    text = out.getvalue()
    assert re.search(r"reward +lacking +acme +1\.0 +missing: no_such_module +pip install it", text)
    assert re.search(r"reward +double +acme +1\.0 +failed +see below", text)
    assert "reward double (acme 1.0) failed" in text and "claimed by acme 1.0 and by other 2.0" in text
    assert "remedy: uninstall one of them" in text


def test_a_narrow_terminal_wraps_and_keeps_names_whole():
    out = io.StringIO()
    plugins.list_plugins(None, True, Console(file=out, force_terminal=True, width=60, markup=False, highlight=False))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert all(len(line) <= 60 for line in text.splitlines())
    assert "training_backend" in text and "exact_match" in text


# --- doctor ---


def test_the_doctor_says_what_is_here_and_ends_with_0():
    console, out = output()
    assert doctor.doctor(console) == 0
    text = out.getvalue()
    for said in (
        "python",
        "cores",
        "memory",
        "/dev/shm",
        "collectives",
        "transformers",
        "fsdp",
        "hybridflow can run here",
    ):
        assert said in text, said
    assert re.search(r"runtime +ray +(ready|missing)", text)


def test_the_doctor_imports_plugins_to_see_whether_they_load(broken):
    states = {name: (state, remedy) for _, name, state, remedy in doctor.plugin_states()}
    assert states["raising"] == ("failed", "see below")
    console, out = output()
    assert doctor.doctor(console) == 0  # the core itself can run
    assert "No module named 'no_such_module'" in out.getvalue() and "no runtime is ready" in out.getvalue()


def test_the_doctor_ends_with_1_when_the_core_cannot_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    console, out = output()
    assert doctor.doctor(console) == 1
    assert "hybridflow cannot run here: torch cannot be imported" in out.getvalue()


def test_a_package_of_another_version_is_pointed_out(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.0.1" if name == "rich" else None)
    found = {name: (have, want) for name, have, want, _ in doctor.packages()}
    assert found["rich"][0] == "0.0.1" and "13.7" in found["rich"][1]
    assert found["ray"] == ("", "") and "pytest" not in found
