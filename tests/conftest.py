"""What tests share: one Ray for the whole session, and runtimes and pools on it.

    ray_cluster    (session) Ray is up. Every RayRuntime made while it is joins this Ray and does not end it.
    ray_runtime    (module)  a RayRuntime; its processes end with the module.
    runtime_name   (module)  "inline", then "ray": a test that asks for it, or for `runtime`, runs under both.
    runtime        (module)  the started runtime of that name.
    launch         (module)  launch(world, name="main") -> Pool of `runtime`; made once per module and name.

    received      the SIGTERMs that reach this program's own handler.
    short         a folder for temporary files, of a short name.
    folder        (session) `folder(name, kind)`: the Hugging Face folder of a tiny model (training_reference.py).
    ranks         (session) `ranks(function, world, *args)`: function(rank, world, *args) on each rank of a gloo group.

Tests that start `hybridflow` as a command get a Ray of their own, as users do.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "ours", deadline=None
)  # time says something of the machine, not of the code
hypothesis.settings.load_profile("ours")
os.environ["HYBRIDFLOW_TESTS"] = str(os.getpid())  # helpers/shared_memory.py
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as in runs (settle/config/waiting.py)
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def ray_cluster():
    pytest.importorskip("ray")
    from hybridflow.backends.ray.config import RayConfig
    from hybridflow.backends.ray.runtime import RayRuntime

    owner = RayRuntime(RayConfig(object_store_gb=0.5))
    owner.start()
    yield owner
    owner.shutdown()


@pytest.fixture(autouse=True)
def the_same_draws():
    """What a test draws without a generator of its own is the same in every run and every order."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """One rank is the test's own process: its group must not meet the tests of other files."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks():
    from helpers.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.end()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`folder(name, kind)`: the Hugging Face folder of a tiny model with weights that make mistakes visible."""
    from helpers.training_reference import write_model

    root, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str, kind: str = "policy") -> str:
        if (name, kind) not in made:
            made[name, kind] = write_model(root / f"{name}-{kind}", name, kind)
        return made[name, kind]

    return get


@pytest.fixture
def received():
    """The signals that reach this program's handler of SIGTERM."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def short():
    """A folder for temporary files whose name leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def ray_runtime(ray_cluster):
    from hybridflow.backends.ray.runtime import RayRuntime

    runtime = RayRuntime()
    runtime.start()
    yield runtime
    runtime.shutdown()


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime_name(request):
    return request.param


@pytest.fixture(scope="module")
def runtime(runtime_name, request):
    if runtime_name == "ray":
        yield request.getfixturevalue("ray_runtime")
        return
    from hybridflow.backends.inline.runtime import InlineRuntime

    runtime = InlineRuntime()
    runtime.start()
    yield runtime
    runtime.shutdown()


@pytest.fixture(scope="module")
def launch(runtime):
    from hybridflow.core.contracts.runtime import ResourcePool
    from hybridflow.core.groups.group import Pool

    pools: dict[str, Pool] = {}

    def launch(world: int, name: str = "main") -> Pool:
        if name not in pools:
            pools[name] = Pool.launch(ResourcePool(name, (world,)), runtime)
        return pools[name]

    return launch
