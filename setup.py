"""The folders of the repository are the packages of the namespace `hybridflow`; their sub-packages are found."""

from setuptools import find_packages, setup

FOLDERS = (
    "core",
    "settle",
    "kit",
    "planner",
    "inference",
    "report",
    "cli",
    "backends",
    "algorithms",
)

packages = [f"hybridflow.{folder}" for folder in FOLDERS]
packages += [
    f"hybridflow.{folder}.{inner}" for folder in FOLDERS for inner in find_packages(folder)
]
setup(packages=packages, package_dir={f"hybridflow.{folder}": folder for folder in FOLDERS})
