"""Plugins are found, listed without being imported, loaded when asked, and refused with a reason."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.packages import python
from helpers.paths import ROOT

from hybridflow.core.errors import PluginError
from hybridflow.core.plugins import KINDS, Descriptor, Registry, hookimpl, hookspecs, registry

HOOKS = [name for name in vars(hookspecs) if name.startswith("hybridflow_")]


def entry_of(found: Registry, kind: str, name: str, package: str | None = None):
    [entry] = [
        e
        for e in found.entries()
        if (e.kind, e.name) == (kind, name) and package in (None, e.package)
    ]
    return entry


HOOKED = """
    from hybridflow.core.plugins import Descriptor, hookimpl
    HYBRIDFLOW_API = {api}
    @hookimpl
    def hybridflow_plugins():
        return [Descriptor("{kind}", "{name}", "{factory}", extra="acme")]
"""


def hooked(kind="reward", name="length", factory="acme_length:Length", api=1):
    return HOOKED.format(kind=kind, name=name, factory=factory, api=api)


# --- finding and listing ---


def test_a_shorthand_entry_point_is_listed_ready_without_its_module_being_imported(site):
    site(
        "acme",
        {"reward.length": "acme_length:Length"},
        {"acme_length.py": "class Length:\n    class Config: pass\n"},
    )
    found = Registry().load()
    entry = entry_of(found, "reward", "length")
    assert (entry.state, entry.remedy, entry.owner) == ("ready", "", "acme 1.0")
    assert "acme_length" not in sys.modules
    loaded = found.get("reward", "length")
    assert loaded.__name__ == "Length" and found.config_class("reward", "length") is loaded.Config


def test_hybridflow_plugins_of_a_module_entry_point_registers_its_descriptors(site):
    site(
        "acme",
        {"acme": "acme_plugin"},
        {"acme_plugin.py": hooked(), "acme_length.py": "Length = 7\n"},
    )
    found = Registry().load()
    assert entry_of(found, "reward", "length").capabilities is None
    assert "acme_length" not in sys.modules
    assert found.get("reward", "length") == 7 and found.config_class("reward", "length") is None


def test_listing_imports_no_torch_ray_or_transformers(tmp_path):
    code = """
        import sys
        from hybridflow.core.plugins import registry
        entries = registry().entries()
        assert entries
        print(*[m for m in ("torch", "ray", "transformers", "vllm", "datasets", "pyarrow", "math_verify") if m in sys.modules])
    """
    done = python(None, tmp_path, "-c", textwrap.dedent(code))
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_our_own_plugins_come_in_by_entry_points():
    assert {"ppo", "grpo", "sft"} <= set(registry().names("algorithm"))
    assert registry() is registry()


def test_loading_twice_registers_nothing_twice(site):
    site("acme", {"acme": "acme_plugin"}, {"acme_plugin.py": hooked()})
    found = Registry().load()
    assert found.load().entries() == found.entries()
    assert found.names("reward").count("length") == 1


# --- broken plugins hurt nobody else ---


@pytest.mark.parametrize(
    "source, why",
    [
        ("raise RuntimeError('no licence\\nfound')", "RuntimeError: no licence found"),
        ("import no_such_module_here", "No module named 'no_such_module_here'"),
        ("import sys; sys.exit(3)", r"acme_plugin called sys.exit\(3\)"),
        (hooked(api=2), "made for plugin API 2, this hybridflow has 1: install a version of acme"),
        (hooked(api="'one'"), "must be an integer, got 'one'"),
        (
            hooked().replace("hybridflow_plugins()", "hybridflow_plugins(config)"),
            "hybridflow_plugins",
        ),
        (
            hooked().replace("hybridflow_plugins()", "hybridflow_plugin()"),
            "did you mean 'hybridflow_plugins'",
        ),
        (hooked().replace("return [", "return 3 #"), "must return a list of Descriptor, got 3"),
        (hooked().replace("return [", "raise OSError('full') #"), "OSError: full"),
    ],
)
def test_a_broken_module_is_listed_with_its_reason_and_hurts_nobody_else(site, source, why):
    site("acme", {"acme": "acme_plugin", "reward.fine": "json:loads"}, {"acme_plugin.py": source})
    found = Registry().load()
    entry = entry_of(found, "module", "acme")
    assert entry.state.startswith("failed: ") and re.search(why, entry.state), entry.state
    assert "\n" not in entry.state and entry.remedy == "upgrade acme, or uninstall it"
    assert found.names("reward").count("length") == 0
    assert found.get("reward", "fine").__name__ == "loads"
    found.notify("hybridflow_step_end", run=None, step=1, metrics={})


def test_an_unknown_kind_is_listed_as_failed_and_the_other_descriptors_of_the_module_work(site):
    source = hooked(kind="rewrad").replace(
        "return [", "return [Descriptor('reward', 'ok', 'json:loads'), "
    )
    site("acme", {"acme": "acme_plugin", "trainer.x": "a:B"}, {"acme_plugin.py": source})
    found = Registry().load()
    assert "did you mean 'reward'?" in entry_of(found, "rewrad", "length").state
    assert "unknown kind 'trainer'" in entry_of(found, "trainer", "x").state
    assert entry_of(found, "reward", "ok").state == "ready"


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("length", "acme_length:Length", 'write "KIND.length"'),
        ("reward.length", "acme_length", 'write "acme_length:Object"'),
    ],
)
def test_an_entry_point_that_mixes_the_two_forms_says_how_to_write_it(site, name, value, why):
    site("acme", {name: value}, {"acme_length.py": ""})
    assert why in entry_of(Registry().load(), "module", name).state


def test_a_malformed_entry_points_file_is_listed_and_the_other_packages_load(site, tmp_path):
    site("acme", {"reward.length": "acme_length:Length"})
    site("broken", {})
    (tmp_path / "broken-1.0.dist-info" / "entry_points.txt").write_text(
        "[hybridflow]\nno equals sign\n"
    )
    found = Registry().load()
    assert entry_of(found, "reward", "length").state == "ready"
    assert entry_of(found, "module", "entry_points.txt", "broken").state.startswith("failed: ")


def test_a_name_claimed_by_two_packages_is_refused_for_both_and_no_other_is_affected(site):
    site("acme", {"reward.length": "a:A", "reward.other": "json:loads"})
    site("bolt", {"reward.length": "b:B"}, version="2.0")
    found = Registry().load()
    with pytest.raises(
        PluginError,
        match=r"'length' .*(acme 1\.0|bolt 2\.0).*: uninstall one",
    ):
        found.get("reward", "length")
    for package in ("acme", "bolt"):
        entry = entry_of(found, "reward", "length", package)
        assert (
            entry.state.startswith("failed: claimed by")
            and "acme 1.0" in entry.state
            and "bolt 2.0" in entry.state
        )
    assert "length" not in found.names("reward") and found.get("reward", "other")


# --- loading one ---


def test_an_unknown_name_lists_the_nearest_what_there_is_and_what_failed(site):
    points = {"reward.length": "a:A", "acme": "acme_plugin"}
    site("acme", points, {"acme_plugin.py": "raise RuntimeError('no licence')"})
    found = Registry().load()
    found.add(Descriptor("reward", "jury", "x:Y", requires=("no_such_module",)))
    with pytest.raises(PluginError) as caught:
        found.get("reward", "lenght")
    text = str(caught.value)
    assert text.startswith("unknown reward 'lenght'; did you mean 'length'? There is: ")
    assert "jury (missing: no_such_module)" in text and "acme 1.0 (RuntimeError" in text


@pytest.mark.parametrize(
    "how, remedy",
    [
        ({"extra": "vllm"}, "pip install 'hybridflow[vllm]'"),
        ({"extra": "vllm", "remedy": "build it from source"}, "build it from source"),
        ({}, "install no_such_module, json.nothing"),
    ],
)
def test_a_missing_requirement_is_listed_and_refused_with_its_remedy(how, remedy):
    found = Registry()
    found.add(
        Descriptor(
            "rollout_engine", "v", "x:Y", requires=("json", "no_such_module", "json.nothing"), **how
        )
    )
    entry = entry_of(found, "rollout_engine", "v")
    assert (entry.state, entry.remedy) == ("missing: no_such_module, json.nothing", remedy)
    with pytest.raises(
        PluginError, match=rf"needs no_such_module, .*, not installed here: {re.escape(remedy)}"
    ):
        found.get("rollout_engine", "v")


def test_a_factory_that_does_not_import_is_refused_with_the_reason_and_then_listed_as_failed(site):
    site(
        "acme", {"reward.length": "acme_length:Lenght"}, {"acme_length.py": "class Length: pass\n"}
    )
    found = Registry().load()
    assert entry_of(found, "reward", "length").state == "ready"
    with pytest.raises(PluginError, match="did you mean 'Length'"):
        found.get("reward", "length")
    assert "has no 'Lenght'" in entry_of(found, "reward", "length").state


def test_the_config_class_of_a_descriptor_loads_without_the_requirements(site):
    site("acme", {}, {"acme_config.py": "class Options: pass\n"})
    found = Registry()
    heavy = Descriptor(
        "runtime", "heavy", "no_such:Thing", config="acme_config:Options", requires="no_such_module"
    )
    found.add(heavy)
    assert found.config_class("runtime", "heavy").__name__ == "Options" and heavy.requires == (
        "no_such_module",
    )
    found.add(Descriptor("runtime", "bad", "no_such:Thing", config="acme_config:Option"))
    with pytest.raises(PluginError, match=r"'bad' .*did you mean 'Options'"):
        found.config_class("runtime", "bad")


@pytest.mark.parametrize("kind", ["reward", "algorithm", "data_source", "protocol", "environment"])
def test_a_path_to_code_stands_for_a_name(site, kind):
    site("acme", {}, {"my_code.py": "class Mine:\n    class Config: pass\n"})
    found = Registry()
    assert found.get(kind, "my_code:Mine").__name__ == "Mine"
    assert found.config_class(kind, "my_code:Mine").__name__ == "Config"
    assert found.get(kind, "my_code:Mine.Config").__name__ == "Config"


@pytest.mark.parametrize(
    "kind, path, why",
    [
        ("runtime", "my_code:Mine", "give a registered name"),
        ("reward", "my_code:", "neither a name nor of the form"),
        ("reward", "my_code:Min", "my_code has no 'Min'; did you mean 'Mine'"),
        ("reward", "no_such_code:Mine", "No module named 'no_such_code'.*current folder"),
        ("reward", "my_code:Other", "made for plugin API 9, this hybridflow has 1"),
    ],
)
def test_a_path_that_cannot_be_loaded_says_why(site, kind, path, why):
    site("acme", {}, {"my_code.py": "class Mine: pass\nclass Other:\n    hybridflow_api = 9\n"})
    with pytest.raises(PluginError, match=why):
        Registry().get(kind, path)


# --- programmatic registration and the API version ---


def test_adding_the_same_descriptor_again_changes_nothing_and_a_second_owner_claims_the_name():
    found, mine = Registry(), Descriptor("reward", "length", "json:loads")
    found.add(mine)
    found.add(mine)
    assert found.get("reward", "length") and found.names("reward") == ["length"]
    found.add(mine, owner="somebody")
    with pytest.raises(PluginError, match="claimed by this process and by somebody"):
        found.descriptor("reward", "length")


def test_a_shorthand_object_made_for_another_api_is_refused_when_it_is_loaded(site):
    site(
        "acme",
        {"reward.length": "acme_length:Length"},
        {"acme_length.py": "class Length:\n    hybridflow_api = 2\n"},
    )
    with pytest.raises(PluginError, match="API 2, this hybridflow has 1"):
        Registry().load().get("reward", "length")


def test_entries_are_sorted_by_kind_and_name():
    found = Registry()
    for kind, name in [("tracker", "b"), ("tracker", "a"), ("algorithm", "z")]:
        found.add(Descriptor(kind, name, "json:loads"))
    assert [e.name for e in found.entries()] == ["z", "a", "b"]


# --- watching a run ---


class Watcher:
    """Remembers what it was told."""

    def __init__(self):
        self.told = []

    @hookimpl
    def hybridflow_step_end(self, run, step, metrics):
        self.told.append(("step_end", run, step, metrics))

    @hookimpl
    def hybridflow_checkpoint(self, step, folder):
        self.told.append(("checkpoint", step, folder))

    @hookimpl
    def hybridflow_metrics(self, step, metrics):
        self.told.append(("metrics", step, metrics))


def test_hybridflow_observers_are_those_of_every_plugin():
    class Sees:
        @hookimpl
        def hybridflow_observers(self, job):
            return [f"sees {job}"]

    found = Registry()
    for plugin in (Watcher(), Sees(), Sees()):
        found.register(plugin, owner=str(id(plugin)))
    assert found.notify("hybridflow_observers", job="a job") == [["sees a job"], ["sees a job"]]


def test_hybridflow_step_end_tells_the_run_the_step_and_its_metrics():
    found, watcher = Registry(), Watcher()
    found.register(watcher)
    found.notify("hybridflow_step_end", run="the run", step=3, metrics={"loss": 0.5})
    assert watcher.told == [("step_end", "the run", 3, {"loss": 0.5})]


def test_hybridflow_checkpoint_tells_the_folder(tmp_path):
    found, watcher = Registry(), Watcher()
    found.register(watcher)
    found.notify("hybridflow_checkpoint", run=None, step=3, folder=tmp_path)
    assert watcher.told == [("checkpoint", 3, tmp_path)]


def test_hybridflow_metrics_tells_what_trackers_get():
    found, watcher = Registry(), Watcher()
    found.register(watcher)
    found.notify("hybridflow_metrics", run=None, step=3, metrics={"val/reward": 1.0})
    assert watcher.told == [("metrics", 3, {"val/reward": 1.0})]


def test_an_observer_that_raises_is_logged_with_its_name_and_the_others_are_still_told(caplog):
    class Loud:
        @hookimpl
        def hybridflow_step_end(self):
            raise RuntimeError("disk full")

    found, first, last = Registry(), Watcher(), Watcher()
    for plugin, owner in [(first, "first"), (Loud(), "loud"), (last, "last")]:
        found.register(plugin, owner)
    found.notify("hybridflow_step_end", run=None, step=1, metrics={})
    assert len(first.told) == len(last.told) == 1
    assert "hybridflow_step_end of plugin loud:" in caplog.text and "disk full" in caplog.text


# --- the page ---


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_docstring_a_test_and_a_heading_with_its_arguments_in_the_page(hook):
    spec = getattr(hookspecs, hook)
    page, tests = (ROOT / "docs/plugins.md").read_text(), Path(__file__).read_text()
    assert spec.__doc__
    assert re.search(rf"def test_{hook}_", tests), f"write a test named test_{hook}_..."
    heading = f"### {hook}({', '.join(inspect.signature(spec).parameters)})"
    assert heading in page, f"docs/plugins.md needs the heading {heading!r}"


def test_the_page_names_every_kind_as_the_code_does():
    page = (ROOT / "docs/plugins.md").read_text()
    for kind, does in KINDS.items():
        assert f"| `{kind}` | {does} |" in page


def test_the_example_plugin_of_the_page_works_as_printed_and_fits_in_60_lines(tmp_path):
    page = (ROOT / "docs/plugins.md").read_text()
    blocks = re.findall(r"```python\n# (acme/\w+\.py).*?\n(.*?)```", page, re.DOTALL)
    toml = re.search(r"```toml\n(\[project\]\n.*?)```", page, re.DOTALL)[1]
    assert (
        len(blocks) == 2
        and sum(source.count("\n") + 1 for _, source in blocks) + toml.count("\n") <= 60
    )
    (tmp_path / "acme").mkdir()
    for path, source in blocks:
        (tmp_path / path).write_text(source)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    points = toml.split("[project.entry-points.hybridflow]\n")[1].replace('"', "")
    (info / "entry_points.txt").write_text("[hybridflow]\n" + points)
    code = """
        from hybridflow.core.plugins import registry
        registry().notify("hybridflow_step_end", run=None, step=1, metrics={"reward": 0.5})
        [entry] = [e for e in registry().entries() if e.package == "acme"]
        print(entry.kind, entry.name, entry.state.split(":")[0])
        from acme.length import LengthReward
        print(LengthReward(LengthReward.Config(limit=1.0))("a b c d"))
    """
    done = python(None, tmp_path, "-c", textwrap.dedent(code))
    assert done.stdout.split("\n")[0] == "1 0.5", done.stderr
    assert re.match(r"reward length (ready|missing)\n1\.0\n", done.stdout.split("\n", 1)[1])


def test_a_device_has_the_first_of_its_own_defaults_that_is_installed():
    def engine(name, requires, **given):
        return Descriptor("rollout_engine", name, "somewhere:Engine", requires=requires, **given)

    found = Registry()
    for descriptor in (
        engine("usual", (), default=True),
        engine("absent", ("no_such_module",), default_on={"cuda": 1}),
        engine("second", ("json",), default_on={"cuda": 3}),
        engine("first", ("json",), default_on={"cuda": 2}),
    ):
        found.add(descriptor)
    assert found.default("rollout_engine") == "usual"
    assert found.default("rollout_engine", "cpu") == "usual"
    assert found.default("rollout_engine", "cuda") == "first"
