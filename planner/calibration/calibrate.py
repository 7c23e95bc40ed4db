"""A machine's own figures for the simulators: measured, and the efficiencies fitted that explain them best.

Small models of a few shapes and layouts take the verbs that a step is made of (probes.py), on all devices at
the same time; the efficiencies are those with which the simulators themselves come nearest to the times.
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

from hybridflow.core.config.structure import structure
from hybridflow.core.contracts.rollout import engine_settings
from hybridflow.core.contracts.training import training_settings
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.job.resolve import resolve_jobs
from hybridflow.core.plugins import registry
from hybridflow.core.running.session import Session, prepare
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.calibration.machine import MachineFigures, MachineProbe
from hybridflow.planner.calibration.probes import Sample
from hybridflow.planner.cluster import GB, Device, Efficiency, Nodes, RunsOn, device_called
from hybridflow.planner.jobs import planned_model
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import PlannedModel, Task, Workload

SHAPES = {
    "cpu": {"small": (128, 3, 64), "wide": (512, 2, 4096), "deep": (256, 8, 512)},
    "cuda": {"small": (1024, 6, 32768), "wide": (3584, 2, 32768), "deep": (1536, 12, 32768)},
}
"""Of the models that are measured: hidden size, layers, vocabulary. On a GPU they take some 30 GB in all."""
SMALL_GPU = 40 * GB
"""GPUs with less memory get half the hidden sizes."""
LENGTHS = {
    "cpu": ((4, 8, 8), (16, 8, 24), (16, 64, 8), (64, 16, 8)),
    "cuda": ((16, 256, 64), (64, 128, 128), (32, 1024, 64), (128, 512, 64)),
}
"""Of the calls: sequences, prompt tokens, response tokens."""
MICRO_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}

START = {
    "training": 0.5, "inference": 0.5, "memory": 0.5, "optimizer": 0.5, "activation_passes": 10.0, "logit_passes": 3.0,
    "micro_batch_us": 300.0, "tp_layer_us": 300.0, "decode_step_us": 500.0, "decode_layer_us": 100.0,
    "decode_tp_layer_us": 100.0, "sequence_us": 5.0,
    "update_ms": 3.0, "call_ms": 3.0, "sync_ms": 3.0, "link": 0.5,
}  # fmt: skip
"""The efficiencies that are fitted, and where the search for them begins."""
SHARES = ("training", "inference", "memory", "optimizer", "link")


@attrs.frozen
class Probed:
    """A sample with what the simulators need to know of it."""

    sample: Sample
    model: PlannedModel
    layout: ParallelLayout
    engines: GenerationLayout

    def predicted(self, nodes: Nodes) -> float:
        """Seconds, as `hybridflow plan` would say."""
        s = self.sample
        verb = "train" if s.verb == "sync" else s.verb
        work = Workload((Task(s.role, verb, s.sequences),), s.prompt, s.response)
        sim = Simulator.of(nodes, work)
        if s.verb == "infer":
            return sim.inference(self.model, s.sequences, self.layout)
        if s.verb == "train":
            return sim.update(self.model, s.sequences, self.layout)
        if s.verb == "sync":
            return sim.transition(self.model, self.layout, self.engines)
        return float(sim.generation(self.model, s.sequences, self.engines, 1e18))


@attrs.frozen
class Calibration:
    """A machine as it was found."""

    nodes: Nodes
    probed: tuple[Probed, ...]

    def errors(self, verb: str | None = None) -> np.ndarray:
        """predicted / measured - 1 of each sample (of a verb)."""
        return _errors([p for p in self.probed if verb in (None, p.sample.verb)], self.nodes)


def calibrate(
    given: Mapping[str, Any], devices: int, name: str | None = None, say=lambda text: None
) -> Calibration:
    """Measure `devices` devices of this machine under the backend, engine and runtime of a config's tables (`given`; what it
    does not say has the usual defaults). Raises ConfigError before anything starts."""
    if devices < 1:
        raise ConfigError(f"--devices {devices}: calibrate at least one device")
    with tempfile.TemporaryDirectory() as folder:
        job = probing_job(given, devices, folder)
        models = {name: planned_model(name, placed, []) for name, placed in job.models.items()}
        with Session(job, prepare(job), say) as session:
            session.say("measuring the machine")
            wide = any(m.execution.compute_bytes == 4 for m in models.values())
            probe = session.make_group(MachineProbe, session.pools["main"], name="machine")
            figures = probe.measure("float32" if wide else "bfloat16").result()
            session.say(f"measuring {len(job.models)} models")
            job.algorithm.step(session.context())
            samples = job.algorithm.samples  # type: ignore[attr-defined]
    probed = []
    for sample in samples:
        placed = job.models[sample.role]
        assert placed.generation is not None
        probed.append(Probed(sample, models[sample.role], placed.layout, placed.generation))
    device = described(figures, job.device, name)
    first = Nodes(device, 1, devices, between_gbs=25.0)
    spec = next(iter(job.models.values())).spec
    efficiency = fit(probed, attrs.evolve(first, efficiency=_measured_links(figures, device)))
    measured = RunsOn(spec.backend, spec.engine or "", 32 if wide else 16)
    nodes = attrs.evolve(first, efficiency=efficiency, given=True, measured=measured)
    return Calibration(nodes, tuple(probed))


def probing_job(given: Mapping[str, Any], devices: int, folder: str) -> Job:
    """The models that are measured, as a job."""
    actor, device = given.get("actor", {}), _device_type(given)
    backend, rollout = dict(actor.get("backend", {})), dict(given.get("rollout", {}))
    small = device == "cuda" and torch.cuda.get_device_properties(0).total_memory < SMALL_GPU
    backend.setdefault("name", registry().default("training_backend"))
    rollout.setdefault("name", registry().default("rollout_engine"))
    settings = _settings("training_backend", backend)
    roles: dict[str, Any] = {}
    for tp, generation in _cuts(backend["name"], rollout["name"], devices):
        for name, (hidden, layers, vocab) in SHAPES[device].items():
            hidden //= 2 if small else 1
            heads = max(2, hidden // 64)
            if heads % tp or (heads // 2) % tp:
                continue
            kv_heads = heads // 2 if heads > 2 else heads
            roles[f"{name}_tp{tp}_engine{generation}"] = {
                "model": {
                    "config": training_settings(settings).example_config(
                        hidden, layers, vocab, heads, kv_heads
                    )
                },
                "backend": backend,
                "layout": {"tp": tp},
                "generation": {"tp": generation},
                "optimizer": {"lr": 1e-6},
                "micro_batch_tokens": MICRO_BATCH_TOKENS[device],
            }
    tables = {
        "run": {"folder": folder, "trackers": [], "device": given.get("run", {}).get("device", "auto")},
        "runtime": given.get("runtime", {}),
        "pools": {"main": [devices]},
        "tokenizer": {"characters": "0123456789+="},
        "data": {"source": "arithmetic", "answer": "{answer}", "bos": True, "max_prompt_tokens": 8},
        "rollout": rollout,
        "algorithm": {
            "name": "hybridflow.planner.calibration.probes:Probes", "roles": list(roles), "lengths": LENGTHS[device],
        },
        **roles,
    }  # fmt: skip
    [job] = resolve_jobs(tables, "calibration", frozenset())
    return _sharing(job) if device == "cuda" else job


def _settings(kind: str, table: Mapping[str, Any]) -> Any:
    """The settings of a plugin's table; None for one that has none. Raises ConfigError."""
    config_class = registry().config_class(kind, table["name"])
    own = {key: value for key, value in table.items() if key != "name"}
    return None if config_class is None else structure(own, config_class, "actor.backend")


def _sharing(job: Job) -> Job:
    """The same models with engines that leave each other room on a device."""
    models = {}
    for name, placed in job.models.items():
        config = engine_settings(placed.spec.engine_config).one_of(len(job.models))
        models[name] = attrs.evolve(placed, spec=attrs.evolve(placed.spec, engine_config=config))
    return attrs.evolve(job, models=models)


def _device_type(given: Mapping[str, Any]) -> str:
    asked = given.get("run", {}).get("device", "auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def _cuts(backend: str, engine: str, devices: int) -> list[tuple[int, int]]:
    """(tp of training, tp of generation) that are measured: none, and over all devices where both can."""
    for kind, name in (("training_backend", backend), ("rollout_engine", engine)):
        if name not in registry().names(kind):
            raise ConfigError(
                f"there is no {kind.replace('_', ' ')} {name!r} (there is: {', '.join(registry().names(kind))})"
            )
    tp = devices if "tp" in registry().training_capabilities(backend).axes else 1
    whole = devices if registry().engine_capabilities(engine).tp else 1
    return list(dict.fromkeys([(1, 1), (tp, whole)]))


def described(found: Sequence[MachineFigures], kind: str, name: str | None) -> Device:
    """A known device by its data sheet; any other by what was measured, the slowest rank's."""
    known = device_called(found[0].name) if kind == "cuda" else None
    if known is not None:
        memory = min(
            known.memory_gb, min(f.memory_bytes for f in found) / GB
        )  # others of that name have less
        return attrs.evolve(known, name=name or known.name, memory_gb=memory)
    links = [f.link_rate for f in found if f.link_rate is not None]
    rate = min(f.memory_rate for f in found) / GB
    return Device(
        memory_gb=min(f.memory_bytes for f in found) / GB,
        tflops=min(f.flops for f in found) / 1e12,
        bandwidth_gbs=rate,
        link_gbs=min(links) / GB if links else rate,
        host_gbs=rate,
        name=name or re.sub(r"[^\w.-]+", "-", found[0].name).lower(),
    )


def _measured_links(found: Sequence[MachineFigures], device: Device) -> Efficiency:
    """Where the fit begins: what the links themselves say."""
    links = [f.link_rate / GB for f in found if f.link_rate is not None]
    start = dict(START)
    if links:
        start |= {
            "link": min(1.0, min(links) / device.link_gbs),
            "link_latency_us": 1e6 * max(f.link_latency for f in found),
        }
    return Efficiency(**start)


def fit(probed: Sequence[Probed], nodes: Nodes) -> Efficiency:
    """The efficiencies, from those of `nodes` on, with which the predictions come nearest to the samples: least squares of
    the relative errors, the large ones damped. What no sample depends on keeps its default."""
    start = nodes.efficiency

    def evolved(names: Sequence[str], values: Sequence[float] | np.ndarray) -> Nodes:
        return attrs.evolve(
            nodes,
            efficiency=attrs.evolve(start, **dict(zip(names, map(float, values), strict=True))),
        )

    base = _errors(probed, nodes)
    felt = [
        n for n in START if np.any(_errors(probed, evolved([n], [0.7 * getattr(start, n)])) != base)
    ]
    unfelt = {n: getattr(Efficiency(), n) for n in START if n not in felt}
    start = attrs.evolve(start, **unfelt)
    first = np.array([getattr(start, n) for n in felt])
    low = np.array([0.01 if n in SHARES else 0.0 for n in felt])
    high = np.array([1.0 if n in SHARES else np.inf for n in felt])
    found = least_squares(
        lambda x: _errors(probed, evolved(felt, x)), np.clip(first, low + 1e-6, high - 1e-6), bounds=(low, high),
        x_scale=first, loss="soft_l1", f_scale=0.1,
    )  # fmt: skip
    return evolved(felt, found.x).efficiency


def _errors(probed: Sequence[Probed], nodes: Nodes) -> np.ndarray:
    return np.array([p.predicted(nodes) / p.sample.seconds - 1.0 for p in probed])
