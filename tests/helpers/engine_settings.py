"""What the settings of every engine that comes as a package are asked: names of arguments, numbers, and shares of a device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from helpers.installed import stand_in
from helpers.tiny import GRPO
from hybridflow.core.contracts.footprint import EngineRoom
from hybridflow.core.names import is_installed
from hybridflow.settle.launch import load_config


class EngineSettings:
    """Subclass it with the config's module, and what is special about the package."""

    module: ModuleType
    config: type
    package: str
    engine: str
    """A module that takes seconds to import."""
    argument: tuple[str, str, Any]
    """One that the package has, the same with a slip of the pen, and a value."""
    ours: str
    """An argument that follows from the config."""
    sources: Mapping[str, str]
    """The files that say the names, as small as can be: with `argument`, and with a class that does not count."""
    wrong: Mapping[str, Any]

    @pytest.fixture
    def unread(self, tmp_path, monkeypatch):
        """No names are known yet, and packages of `tmp_path` are found before others."""
        monkeypatch.delitem(sys.modules, self.package, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        self.module.argument_names.cache_clear()
        yield tmp_path
        self.module.argument_names.cache_clear()

    @pytest.fixture
    def installed(self):
        if not is_installed(self.package):
            pytest.skip(f"needs {self.package}: make test-engines")

    def test_arguments_are_read_off_the_package_and_others_name_the_nearest(self, unread):
        stand_in(unread, self.package, files={f"{self.package}/__init__.py": "", **self.sources})
        self.check_the_argument()
        with pytest.raises(ValueError, match="no argument 'unrelated'"):
            self.config(engine_args={"unrelated": 1})

    def test_where_no_names_are_known_none_is_refused_but_ours(self, unread):
        stand_in(unread, self.package, files={f"{self.package}/__init__.py": ""})
        assert self.module.argument_names() == ()
        assert self.config(engine_args={"anything": 1}).engine_args == {"anything": 1}
        with pytest.raises(ValueError, match=f"{self.ours} follows from the rest"):
            self.config(engine_args={self.ours: 2})

    def test_the_installed_package_has_the_argument_and_all_that_are_ours(self, installed):
        self.module.argument_names.cache_clear()
        self.check_the_argument()
        assert set(self.module.argument_names()) >= self.module.OURS

    def check_the_argument(self) -> None:
        name, slip, value = self.argument
        assert self.config(engine_args={name: value}).engine_args == {name: value}
        with pytest.raises(ValueError, match=rf"no argument '{slip}'; did you mean '{name}'\?"):
            self.config(engine_args={slip: value})

    def test_reading_the_names_imports_no_engine(self, installed):
        code = f"from {self.module.__name__} import argument_names; argument_names()\n"
        code += f"import sys; print({self.engine!r} in sys.modules)"
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert out.strip() == "False"

    def test_numbers_that_cannot_be_are_refused(self):
        for name, value in self.wrong.items():
            with pytest.raises(ValueError, match=name):
                self.config(**{name: value})

    def test_weights_have_the_bytes_of_their_type(self):
        assert self.config(dtype="float32").limits().weight_bytes == 4
        assert self.config(dtype="bfloat16").limits().weight_bytes == 2

    def test_engines_on_one_device_share_half_of_it(self):
        assert self.config(gpu_memory=0.4).one_of(1).gpu_memory == 0.4
        assert self.config(gpu_memory=0.4).one_of(4).gpu_memory == 0.125

    def test_a_context_is_that_of_the_runs_longest_sequences_unless_it_is_given(self):
        assert self.config().up_to(4096).max_length == 4096
        assert self.config(max_length=1024).up_to(4096).max_length == 1024

    def test_a_room_limits_the_share_of_the_device(self):
        room = EngineRoom(device=80e9, share=24e9, cache=20e9)
        assert self.config(gpu_memory=0.6).within(room).gpu_memory == pytest.approx(0.3)
        assert self.config(gpu_memory=0.2).within(room).gpu_memory == 0.2

    def test_weights_can_be_compared_in_full_at_every_sync(self, installed, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny.toml").write_text(GRPO.replace('"rewards:digits"', '"exact_match"'))
        wide = "actor.model.config.head_dim=32"  # the least that vLLM takes on a CPU
        [job] = load_config(
            "tiny.toml", [f"rollout={self.package}", "actor.sync.verify=true", wide]
        )
        assert job.models["actor"].spec.sync.verify
