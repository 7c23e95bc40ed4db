"""`hybridflow plugins`: the listing, and what to do about what is not ready."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers.configs import console

from hybridflow.cli.main import main
from hybridflow.cli.plugins import list_plugins, spell, state_of
from hybridflow.core.contracts.capabilities import RuntimeCapabilities, TrainingCapabilities
from hybridflow.core.errors import PluginError
from hybridflow.core.plugins.lookup import Entry


def listed(kind: str | None = None, capabilities: bool = False, **screen: int | bool) -> str:
    to, out = console(**screen)
    list_plugins(kind, capabilities, to)
    return out.getvalue()


def test_it_imports_no_torch():
    code = """if True:
        import sys
        from hybridflow.cli.main import main
        assert main(["plugins", "--capabilities"]) == 0
        print([m for m in ("torch", "ray", "transformers", "numpy") if m in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]"), done.stderr
    assert re.search(r"algorithm +grpo +hybridflow +\S+ +ready", done.stdout)
    fsdp = r"training_backend +fsdp +axes: dp, tp; models: policy, score, value; devices: cpu, cuda"
    assert re.search(fsdp, done.stdout)


def test_one_kind_and_an_unknown_one():
    assert "jsonl" in listed("tracker") and "grpo" not in listed("tracker")
    assert "there is no plugin of kind protocol" in listed("protocol")
    with pytest.raises(PluginError, match="did you mean 'reward'"):
        listed("rewards")


def test_capabilities_are_listed_only_on_demand(capsys, path):
    assert main(["plugins", "runtime"]) == 0
    without = capsys.readouterr().out
    assert main(["plugins", "runtime", "--capabilities"]) == 0
    assert "can do" not in without and "can do" in capsys.readouterr().out


def test_what_is_missing_has_its_remedy_and_what_failed_has_its_reason_below(broken):
    text = listed()
    assert re.search(r"reward +lacking +acme +1\.0 +missing: no_such_module +pip install it", text)
    assert re.search(r"reward +double +acme +1\.0 +failed +see below", text)
    assert "claimed by acme 1.0 and by other 2.0" in text and "remedy: uninstall one" in text


def test_a_narrow_terminal_wraps_and_keeps_names_whole():
    text = re.sub(r"\x1b\[[0-9;]*m", "", listed(None, True, width=60, terminal=True))
    assert all(len(line) <= 60 for line in text.splitlines())
    assert "training_backend" in text and "exact_match" in text


def test_a_state_is_told_with_what_to_do():
    def state(text: str) -> tuple[str, str]:
        return state_of(Entry("reward", "mine", "acme", "1.0", None, text, "pip install it"))

    assert state("missing: no_such_module") == ("missing: no_such_module", "pip install it")
    assert state("failed: it raised") == ("failed", "see below")


def test_capabilities_in_words_leave_out_what_it_has_not():
    nothing = frozenset()
    can = TrainingCapabilities(
        axes=frozenset({"tp", "dp"}),
        models=nothing,
        devices=nothing,
    )
    assert spell(can) == "axes: dp, tp"
    assert spell(RuntimeCapabilities(max_ranks=1)) == "processes; max_ranks: 1"
    assert spell(None) == ""
