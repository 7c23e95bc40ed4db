"""Calibration: a machine's own efficiencies, fitted to measured times.

Small models of a few shapes and layouts run the calls that a step is made of (probes.py), on all
devices at the same time. The simulators predict the same times. The fit chooses the efficiencies
with which the predictions come nearest to the measured times.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from scipy.optimize import least_squares

from hybridflow.core.contracts.rollout import engine_settings
from hybridflow.core.contracts.training import training_settings
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.running.session import Session, prepare
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.calibration.machine import MachineFigures, MachineProbe
from hybridflow.planner.calibration.probes import Sample
from hybridflow.planner.cluster import GB, Device, Efficiency, Nodes, RunsOn, device_called
from hybridflow.planner.jobs import planned_model
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import PlannedModel, Task, Workload
from hybridflow.settle.config.structure import structure
from hybridflow.settle.resolve import resolve_jobs

SHAPES = {
    "cpu": {
        "small": (128, 3, 64),
        "wide": (512, 2, 4096),
        "deep": (256, 8, 512),
    },
    "cuda": {
        "small": (1024, 6, 32768),
        "wide": (3584, 2, 32768),
        "deep": (1536, 12, 32768),
    },
}
"""Hidden size, layers and vocabulary of the models that are measured. On a GPU they take some 30 GB
in all."""
SMALL_GPU = 40 * GB
"""GPUs with less memory get half the hidden sizes."""
LENGTHS = {
    "cpu": (
        (4, 8, 8),
        (16, 8, 24),
        (16, 64, 8),
        (64, 16, 8),
    ),
    "cuda": (
        (16, 256, 64),
        (64, 128, 128),
        (32, 1024, 64),
        (128, 512, 64),
    ),
}
"""Sequences, prompt tokens and response tokens of the calls."""
MICRO_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}

START = {
    "training": 0.5,
    "inference": 0.5,
    "memory": 0.5,
    "optimizer": 0.5,
    "activation_passes": 10.0,
    "logit_passes": 3.0,
    "micro_batch_us": 300.0,
    "tp_layer_us": 300.0,
    "decode_step_us": 500.0,
    "decode_layer_us": 100.0,
    "decode_tp_layer_us": 100.0,
    "sequence_us": 5.0,
    "update_ms": 3.0,
    "call_ms": 3.0,
    "sync_ms": 3.0,
    "link": 0.5,
}
"""The efficiencies that are fitted, and where the search for them begins."""
SHARES = ("training", "inference", "memory", "optimizer", "link")
"""The names in START that are fractions of a peak; the others are times and numbers of passes."""


@attrs.frozen
class Probed:
    """A sample with what the simulators need to predict its time."""

    sample: Sample
    model: PlannedModel
    layout: ParallelLayout
    engines: GenerationLayout

    def predicted(self, nodes: Nodes) -> float:
        """Return the call's seconds on these nodes, as `hybridflow plan` would predict them."""
        sample = self.sample
        verb = "train" if sample.verb == "sync" else sample.verb
        task = Task(sample.role, verb, sample.sequences)
        simulator = Simulator.of(nodes, Workload((task,), sample.prompt, sample.response))

        if sample.verb == "infer":
            return simulator.inference(self.model, sample.sequences, self.layout)
        if sample.verb == "train":
            return simulator.update(self.model, sample.sequences, self.layout)
        if sample.verb == "sync":
            return simulator.transition(self.model, self.layout, self.engines)
        # With 10^18 bytes the cache is no limit: the samples are small.
        return float(simulator.generation(self.model, sample.sequences, self.engines, 1e18))


@attrs.frozen
class Calibration:
    """A machine with its fitted efficiencies, and the samples they were fitted to."""

    nodes: Nodes
    probed: tuple[Probed, ...]

    def errors(self, verb: str | None = None) -> np.ndarray:
        """[samples]: predicted / measured - 1 of each sample (of one verb)."""
        probed = [p for p in self.probed if verb in (None, p.sample.verb)]
        return _errors(probed, self.nodes)


def calibrate(
    given: Mapping[str, Any], devices: int, name: str | None = None, say=lambda text: None
) -> Calibration:
    """Measure `devices` devices of this machine.

    `given` are a config's tables: their backend, engine and runtime are measured, the defaults
    where they name none. `name` is the device's name in the result, `say` gets progress messages.
    Raises ConfigError before anything starts.
    """
    if devices < 1:
        raise ConfigError(f"--devices {devices}: calibrate at least one device")

    # The rates of the machine itself, then the times of the models' calls.
    with tempfile.TemporaryDirectory() as folder:
        job = probing_job(given, devices, folder)
        models = {role: planned_model(role, placed, []) for role, placed in job.models.items()}
        with Session(job, prepare(job), say) as session:
            session.say("measuring the machine")
            wide = any(m.execution.compute_bytes == 4 for m in models.values())
            probe = session.make_group(MachineProbe, session.pools["main"], name="machine")
            figures = probe.measure("float32" if wide else "bfloat16").result()

            session.say(f"measuring {len(job.models)} models")
            job.algorithm.step(session.context())
            samples = job.algorithm.samples  # type: ignore[attr-defined]

    # Beside each sample, what the simulators need to predict it.
    probed = []
    for sample in samples:
        placed = job.models[sample.role]
        assert placed.generation is not None
        probed.append(Probed(sample, models[sample.role], placed.layout, placed.generation))

    # The links were measured directly; the fit begins with them.
    device = described(figures, job.device, name)
    first = Nodes(device, 1, devices, between_gbs=25.0)
    spec = next(iter(job.models.values())).spec
    efficiency = fit(probed, attrs.evolve(first, efficiency=_measured_links(figures, device)))
    measured = RunsOn(spec.backend, spec.engine or "", 32 if wide else 16)
    nodes = attrs.evolve(first, efficiency=efficiency, given=True, measured=measured)
    return Calibration(nodes, tuple(probed))


def probing_job(given: Mapping[str, Any], devices: int, folder: str) -> Job:
    """Return the job that measures: one role per model and way to cut it, all in one pool."""
    device = _device_type(given)
    backend = dict(given.get("actor", {}).get("backend", {}))
    rollout = dict(given.get("rollout", {}))
    backend.setdefault("name", registry().default("training_backend"))
    rollout.setdefault("name", registry().default("rollout_engine", device))

    # A config like any other; the algorithm only measures times, and no data is read.
    roles = _roles(backend, rollout["name"], device, devices)
    asked = given.get("run", {}).get("device", "auto")
    tables = {
        "run": {"folder": folder, "trackers": [], "device": asked},
        "runtime": given.get("runtime", {}),
        "pools": {"main": [devices]},
        "tokenizer": {"characters": "0123456789+="},
        "data": {
            "source": "arithmetic",
            "answer": "{answer}",
            "bos": True,
            "max_prompt_tokens": 8,
        },
        "rollout": rollout,
        "algorithm": {
            "name": "hybridflow.planner.calibration.probes:Probes",
            "roles": list(roles),
            "lengths": LENGTHS[device],
        },
        **roles,
    }
    [job] = resolve_jobs(tables, "calibration")
    return _sharing(job) if device == "cuda" else job


def _roles(
    backend: Mapping[str, Any], engine: str, device: str, devices: int
) -> dict[str, dict[str, Any]]:
    """Return the tables of the models that are measured, by role."""
    small = device == "cuda" and torch.cuda.get_device_properties(0).total_memory < SMALL_GPU
    settings = training_settings(_settings("training_backend", backend))

    # Heads of 64, two at the least; tp must divide the heads of keys and values too.
    roles: dict[str, dict[str, Any]] = {}
    for tp, generation in _cuts(backend["name"], engine, devices):
        for name, (hidden, layers, vocab) in SHAPES[device].items():
            hidden //= 2 if small else 1
            heads = max(2, hidden // 64)
            kv_heads = heads // 2 if heads > 2 else heads
            if heads % tp or (heads // 2) % tp:
                continue
            config = settings.example_config(hidden, layers, vocab, heads, kv_heads)
            roles[f"{name}_tp{tp}_engine{generation}"] = {
                "model": {"config": config},
                "backend": backend,
                "layout": {"tp": tp},
                "generation": {"tp": generation},
                "optimizer": {"lr": 1e-6},
                "micro_batch_tokens": MICRO_BATCH_TOKENS[device],
            }
    return roles


def _settings(kind: str, table: Mapping[str, Any]) -> Any:
    """Return the settings of a plugin's table; None for one that has none. Raises ConfigError."""
    config_class = registry().config_class(kind, table["name"])
    own = {key: value for key, value in table.items() if key != "name"}
    return None if config_class is None else structure(own, config_class, "actor.backend")


def _sharing(job: Job) -> Job:
    """Return the same models with engines that leave each other room on a device."""
    models = {}
    for name, placed in job.models.items():
        config = engine_settings(placed.spec.engine_config).one_of(len(job.models))
        models[name] = attrs.evolve(placed, spec=attrs.evolve(placed.spec, engine_config=config))
    return attrs.evolve(job, models=models)


def _device_type(given: Mapping[str, Any]) -> str:
    """Return "cpu" or "cuda" from [run]; "auto" is "cuda" where the machine has GPUs."""
    asked = given.get("run", {}).get("device", "auto")
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cuts(backend: str, engine: str, devices: int) -> list[tuple[int, int]]:
    """Return the measured pairs of tp in training and in generation.

    They are (1, 1) and all devices for whichever of the two has tensor parallelism. Raises
    ConfigError for a backend or an engine that is not installed.
    """
    for kind, name in (("training_backend", backend), ("rollout_engine", engine)):
        names = registry().names(kind)
        if name not in names:
            raise ConfigError(
                f"there is no {kind.replace('_', ' ')} {name!r} (there is: {', '.join(names)})"
            )

    # Where neither can, both pairs are the same and one stays.
    tp = devices if "tp" in registry().training_capabilities(backend).axes else 1
    generation = devices if registry().engine_capabilities(engine).tp else 1
    return list(dict.fromkeys([(1, 1), (tp, generation)]))


def described(found: Sequence[MachineFigures], kind: str, name: str | None) -> Device:
    """Return a known device by its data sheet, any other by the slowest rank's measurements."""
    memory_gb = min(figures.memory_bytes for figures in found) / GB
    known = device_called(found[0].name) if kind == "cuda" else None
    if known is not None:
        # Some devices of that name have less memory than the data sheet says.
        memory_gb = min(known.memory_gb, memory_gb)
        return attrs.evolve(known, name=name or known.name, memory_gb=memory_gb)

    # One rank has no link: its memory's rate is used for the link, and for the host's.
    links = [figures.link_rate for figures in found if figures.link_rate is not None]
    rate = min(figures.memory_rate for figures in found) / GB
    return Device(
        memory_gb=memory_gb,
        tflops=min(figures.flops for figures in found) / 1e12,
        bandwidth_gbs=rate,
        link_gbs=min(links) / GB if links else rate,
        host_gbs=rate,
        name=name or re.sub(r"[^\w.-]+", "-", found[0].name).lower(),
    )


def _measured_links(found: Sequence[MachineFigures], device: Device) -> Efficiency:
    """Return the efficiencies where the fit begins: START, and those of links as they were
    measured.
    """
    links = [figures.link_rate / GB for figures in found if figures.link_rate is not None]
    start = dict(START)
    if links:
        start["link"] = min(1.0, min(links) / device.link_gbs)
        start["link_latency_us"] = 1e6 * max(figures.link_latency for figures in found)
    return Efficiency(**start)


def fit(probed: Sequence[Probed], nodes: Nodes) -> Efficiency:
    """Return the efficiencies with which the predictions come nearest to the samples.

    They minimise the squares of the relative errors, predicted / measured - 1, of which large ones
    are damped (soft L1). The search begins with the efficiencies of `nodes`. An efficiency on which
    no sample depends gets its default.
    """
    # An efficiency counts if a change of 30% changes any prediction.
    start = nodes.efficiency
    base = _errors(probed, nodes)
    fitted = []
    for name in START:
        changed = _changed(nodes, start, [name], [0.7 * getattr(start, name)])
        if np.any(_errors(probed, changed) != base):
            fitted.append(name)
    defaults = {name: getattr(Efficiency(), name) for name in START if name not in fitted}
    start = attrs.evolve(start, **defaults)

    # Shares are at most 1, and above 0 as they divide.
    first = np.array([getattr(start, name) for name in fitted])
    low = np.array([0.01 if name in SHARES else 0.0 for name in fitted])
    high = np.array([1.0 if name in SHARES else np.inf for name in fitted])
    result = least_squares(
        lambda values: _errors(probed, _changed(nodes, start, fitted, values)),
        np.clip(first, low + 1e-6, high - 1e-6),
        bounds=(low, high),
        x_scale=first,
        loss="soft_l1",
        f_scale=0.1,
    )
    return _changed(nodes, start, fitted, result.x).efficiency


def _changed(
    nodes: Nodes, start: Efficiency, names: Sequence[str], values: Sequence[float] | np.ndarray
) -> Nodes:
    """Return the nodes with the efficiencies `start`, of which `names` have the given values."""
    changes = dict(zip(names, map(float, values), strict=True))
    return attrs.evolve(nodes, efficiency=attrs.evolve(start, **changes))


def _errors(probed: Sequence[Probed], nodes: Nodes) -> np.ndarray:
    """[samples]: predicted / measured - 1."""
    return np.array([p.predicted(nodes) / p.sample.seconds - 1.0 for p in probed])
