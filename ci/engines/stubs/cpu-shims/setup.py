import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(
    build_py
):  # a .pth at the wheel's root lands in site-packages: read by every interpreter of the venv
    def run(self):
        super().run()
        pathlib.Path(self.build_lib, "hybridflow_cpu.pth").write_text("import _hybridflow_cpu\n")


setup(cmdclass={"build_py": BuildPy})
