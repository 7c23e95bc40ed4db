"""Clusters: nodes of devices, what a device does per second by its data sheet, and what of that is reached in practice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.config.load import load_toml
from hybridflow.core.config.structure import structure
from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean
from hybridflow.core.validators import at_least, fraction, non_negative, share, validator

GB = 1e9
positive_figure = validator(
    lambda value: 0 < value < float("inf"),
    "above 0 and finite",
    "give the figure of the data sheet",
)
"""0 < value < infinity."""


@attrs.frozen
class Device:
    """One accelerator, by its data sheet; in a cluster's file [devices.NAME]."""

    memory_gb: float = attrs.field(validator=positive_figure)
    """Its memory, in 10^9 bytes."""
    tflops: float = attrs.field(validator=positive_figure)
    """Dense matrix products in bf16, 10^12 operations per second."""
    bandwidth_gbs: float = attrs.field(validator=positive_figure)
    """Of its memory, 10^9 bytes per second."""
    link_gbs: float = attrs.field(validator=positive_figure)
    """To the other devices of its node, 10^9 bytes per second in each direction."""
    host_gbs: float = attrs.field(default=25.0, validator=positive_figure)
    """To the memory of its host, for offloading."""
    fp8_tflops: float | None = attrs.field(default=None, validator=positive_figure)
    """Dense matrix products in fp8, where it has them."""
    fp32_tflops: float | None = attrs.field(default=None, validator=positive_figure, kw_only=True)
    """Matrix products in float32, without TF32; none: as `tflops`."""
    name: str = attrs.field(default="", kw_only=True)


def _known(*rows: tuple[Any, ...]) -> dict[str, Device]:
    """name, memory_gb, tflops, fp32_tflops, bandwidth_gbs, link_gbs, and host_gbs and fp8_tflops where they are not usual."""
    return {
        name: Device(memory, tflops, *others, fp32_tflops=wide, name=name)
        for name, memory, tflops, wide, *others in rows
    }


DEVICES = _known(
    ("a100-40gb", 40, 312, 19.5, 1555, 300),
    ("a100-80gb", 80, 312, 19.5, 2039, 300),
    ("a800-80gb", 80, 312, 19.5, 2039, 200),
    ("h100-80gb", 80, 989, 67, 3350, 450, 55, 1979),
    ("h800-80gb", 80, 989, 67, 3350, 200, 55, 1979),
    ("h20-96gb", 96, 148, 44, 4000, 450, 55, 296),
    ("h200-141gb", 141, 989, 67, 4800, 450, 55, 1979),
    ("b200-180gb", 180, 2250, 75, 7700, 900, 55, 4500),
    ("mi250x-128gb", 128, 383, 95.7, 3277, 250),
    ("mi300x-192gb", 192, 1307, 163.4, 5300, 448, 55, 2615),
    ("l40s-48gb", 48, 362, 91.6, 864, 32, 25, 733),
    ("l4-24gb", 24, 121, 30.3, 300, 32, 25, 242),
    ("a10g-24gb", 24, 70, 31.2, 600, 32),
    ("rtx4090-24gb", 24, 165, 82.6, 1008, 32, 25, 330),
    ("v100-32gb", 32, 125, 15.7, 900, 150, 12),
)
"""Data sheets' figures: memory, dense bf16 (V100: fp16), float32, memory bandwidth, link per direction (half of what NVLink
sheets say, which count both), host link, fp8."""


@attrs.frozen
class Efficiency:
    """What of a data sheet is reached, and what every step costs beside. One set for a kind of device, for all models."""

    training: float = attrs.field(default=0.5, validator=fraction)
    """Of the matrix products' peak, in training."""
    inference: float = attrs.field(default=0.5, validator=fraction)
    """The same in a forward pass, also of a prompt."""
    memory: float = attrs.field(default=0.8, validator=fraction)
    """Of the memory's bandwidth, when decoding."""
    optimizer: float = attrs.field(default=0.8, validator=fraction)
    """Of the memory's bandwidth, in an optimizer step."""
    link: float = attrs.field(default=0.8, validator=fraction)
    """Of the links inside a node."""
    network: float = attrs.field(default=0.8, validator=fraction)
    """Of the links between nodes."""
    overlap: float = attrs.field(default=0.0, validator=share)
    """Share of the reduction of gradients that hides behind the backward pass."""
    usable: float = attrs.field(default=0.9, validator=fraction)
    """Of the memory: the rest is fragmentation, the communication library and the context."""
    link_latency_us: float = attrs.field(default=3.0, validator=non_negative)
    """Of one collective inside a node, per rank that it steps over."""
    network_latency_us: float = attrs.field(default=20.0, validator=non_negative)
    """The same between nodes."""
    decode_step_us: float = attrs.field(default=0.0, validator=non_negative)
    """Of one decoding step, whatever it decodes: launches."""
    decode_layer_us: float = attrs.field(default=0.0, validator=non_negative)
    """Of one layer of a decoding step."""
    decode_tp_layer_us: float = attrs.field(default=0.0, validator=non_negative)
    """The same more of a layer that is cut by tensor parallelism."""
    sequence_us: float = attrs.field(default=25.0, validator=non_negative)
    """The engine's own work per sequence and decoding step: scheduling, sampling."""
    micro_batch_us: float = attrs.field(default=0.0, validator=non_negative)
    """Of one layer of a micro-batch, forward: launches."""
    tp_layer_us: float = attrs.field(default=0.0, validator=non_negative)
    """The same more of a layer that is cut by tensor parallelism."""
    activation_passes: float = attrs.field(default=0.0, validator=non_negative)
    """How often a layer's hidden states go through the memory in a forward pass, beside its matrix products: norms, rotations,
    residuals. 0 where `training` and `inference` include it."""
    logit_passes: float = attrs.field(default=0.0, validator=non_negative)
    """The same of the logits, in float32."""
    update_ms: float = attrs.field(default=0.0, validator=non_negative)
    """Of an update, whatever it updates."""
    call_ms: float = attrs.field(default=0.0, validator=non_negative)
    """Of one call of a role: dispatch."""
    sync_ms: float = attrs.field(default=0.0, validator=non_negative)
    """Of one transition of weights to the engine, whatever they weigh."""


@attrs.frozen
class RunsOn:
    """What times hold for."""

    backend: str
    engine: str | None
    bits: int = 0
    """Of a number that is computed with; 0: not known."""


@attrs.frozen
class Nodes:
    """Equal machines."""

    device: Device
    count: int = attrs.field(validator=at_least(1))
    per_node: int = attrs.field(validator=at_least(1))
    """Devices of one machine."""
    between_gbs: float = attrs.field(validator=positive_figure)
    """Of one machine to the others, 10^9 bytes per second in each direction."""
    efficiency: Efficiency = attrs.field(factory=Efficiency)
    given: bool = False
    """Whether somebody gave the efficiencies."""
    measured: RunsOn | None = None
    """With what `hybridflow calibrate` found them."""

    @property
    def devices(self) -> int:
        return self.count * self.per_node

    @property
    def figures(self) -> str:
        """Where they are from, for a reader."""
        return "measured" if self.measured else "given" if self.given else "tabled"

    @property
    def memory(self) -> float:
        """Usable bytes of one device."""
        return self.device.memory_gb * GB * self.efficiency.usable

    def sizes(self) -> list[int]:
        """Devices that a pool may have: the parts of a node (halved, or by its smallest factor, down to 1; so parts of a
        node always pack), and whole nodes."""
        parts, size = [], self.per_node
        while size > 1:
            size //= next(f for f in range(2, size + 1) if size % f == 0)
            parts.append(size)
        return [*reversed(parts), *range(self.per_node, self.devices + 1, self.per_node)]


@attrs.frozen
class Cluster:
    """One or several kinds of nodes. Pools do not mix kinds."""

    nodes: tuple[Nodes, ...]

    def __attrs_post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError(
                "the cluster has no device; give it [[nodes]] with device, count and per_node"
            )

    @property
    def devices(self) -> int:
        return sum(nodes.devices for nodes in self.nodes)

    @classmethod
    def of(
        cls,
        device: str,
        count: int,
        per_node: int = 8,
        between_gbs: float = 25.0,
        efficiency: Efficiency | None = None,
    ) -> Cluster:
        """`count` machines of one known kind. Raises ConfigError for a kind that is not in the table."""
        return cls(
            (
                Nodes(
                    known_device(device, {}),
                    count,
                    per_node,
                    between_gbs,
                    efficiency or Efficiency(),
                ),
            )
        )

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """From a TOML file (docs/mapping.md). Raises ConfigError that lists what is wrong with it."""
        return cls.from_tables(load_toml(path), str(path))

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], where: str = "cluster") -> Cluster:
        problems: list[str] = []
        file = structure(dict(tables), ClusterFile, "", problems)
        if file is None or problems:
            raise ConfigError([f"{where}: {problem}" for problem in problems])
        found: list[Nodes] = []
        own = {name: attrs.evolve(device, name=name) for name, device in file.devices.items()}
        for at, nodes in enumerate(file.nodes):
            try:
                device = known_device(nodes.device, own)
            except ConfigError as error:
                problems += [f"{where}: nodes.{at}.device: {p}" for p in error.problems]
                continue
            found.append(
                Nodes(
                    device,
                    nodes.count,
                    nodes.per_node,
                    nodes.between_gbps / 8,
                    file.efficiency.get(nodes.device, Efficiency()),
                    nodes.device in file.efficiency,
                    RunsOn(by.backend, by.engine, by.bits)
                    if (by := file.measured.get(nodes.device))
                    else None,
                )
            )
        if not file.nodes:
            problems.append(
                f"{where}: the cluster has no device; give it [[nodes]] with device, count and per_node"
            )
        problems += [
            f"{where}: measured.{n}: there is no [efficiency.{n}]; calibrate writes both" for n in file.measured
            if n not in file.efficiency
        ]  # fmt: skip
        problems += [f"{where}: efficiency.{n}: no [[nodes]] are of this device" for n in file.efficiency
                     if n not in {nodes.device for nodes in file.nodes}]  # fmt: skip
        if problems:
            raise ConfigError(problems)
        return cls(tuple(found))

    def sized(self, devices: int) -> Cluster:
        """As many of the same: whole nodes, or a part of one. Raises ConfigError for other numbers, and for nodes of several
        kinds."""
        if len(self.nodes) > 1:
            raise ConfigError(
                f"the cluster has {len(self.nodes)} kinds of nodes; other sizes can be asked of one kind"
            )
        [nodes] = self.nodes
        if devices < 1 or (devices > nodes.per_node and devices % nodes.per_node):
            raise ConfigError(
                f"{devices} devices are not whole nodes of {nodes.per_node}; give a multiple of that"
            )
        if devices <= nodes.per_node:
            return Cluster((attrs.evolve(nodes, count=1, per_node=devices),))
        return Cluster((attrs.evolve(nodes, count=devices // nodes.per_node),))


@attrs.frozen
class NodesSection:
    """[[nodes]]: equal machines."""

    device: str
    """A name of the table, or of [devices.NAME]."""
    count: int = attrs.field(default=1, validator=at_least(1))
    """Machines."""
    per_node: int = attrs.field(default=8, validator=at_least(1))
    """Devices of each."""
    between_gbps: float = attrs.field(default=200.0, validator=positive_figure)
    """Of one machine to the others, 10^9 bits per second in each direction."""


@attrs.frozen
class MeasuredSection:
    """[measured.NAME]: how a device's efficiencies were found."""

    backend: str
    engine: str
    bits: int = attrs.field(default=0, validator=attrs.validators.in_((0, 8, 16, 32)))
    """Of the numbers that were computed with; 0: not known."""
    on: str = ""
    """Date, devices and versions."""
    error: float = attrs.field(default=0.0, validator=non_negative)
    """Mean error of the simulators on the calibration's own samples."""


@attrs.frozen
class ClusterFile:
    """A cluster's TOML file."""

    nodes: tuple[NodesSection, ...] = ()
    devices: dict[str, Device] = attrs.field(factory=dict)
    efficiency: dict[str, Efficiency] = attrs.field(factory=dict)
    """By device."""
    measured: dict[str, MeasuredSection] = attrs.field(factory=dict)
    """By device; `hybridflow calibrate` writes it."""


def known_device(name: str, own: Mapping[str, Device]) -> Device:
    """By its name. Raises ConfigError that lists the names there are."""
    there = {**DEVICES, **own}
    if name not in there:
        raise ConfigError(
            f"no device is called {name!r}{did_you_mean(name, there)} (known: {', '.join(there)}); describe it in "
            f"[devices.{name}] with memory_gb, tflops, bandwidth_gbs and link_gbs"
        )
    return there[name]


def device_called(text: str) -> Device | None:
    """The known device that a driver calls so: "NVIDIA A100-SXM4-80GB"; None for others."""
    words = set(re.split(r"[^a-z0-9]+", text.lower().replace("rtx 4090", "rtx4090")))
    found = [d for n, d in DEVICES.items() if (kind := n.rpartition("-")) and kind[0] in words]
    exact = [d for d in found if d.name.rpartition("-")[2] in words]
    return next(iter(exact or found), None)


SHORT = re.compile(r"([\w.-]+):(\d+)x(\d+)(?:@(\d+(?:\.\d+)?))?")


def read_cluster(text: str) -> Cluster:
    """A TOML file, or DEVICE:NODESxDEVICES[@GBIT/S]: "a100-80gb:2x8", "h100-80gb:16x8@3200". Raises ConfigError."""
    if Path(text).exists():
        return Cluster.read(text)
    if found := SHORT.fullmatch(text):
        device, count, per_node, between = found.groups()
        tables = {"device": device, "count": int(count), "per_node": int(per_node)}
        return Cluster.from_tables(
            {"nodes": [tables | ({"between_gbps": float(between)} if between else {})]}, "--cluster"
        )
    raise ConfigError(
        f"the cluster {text!r} is no file, and not DEVICE:NODESxDEVICES[@GBIT/S]; write a-cluster.toml, or h100-80gb:2x8, or "
        "h100-80gb:2x8@3200 (docs/mapping.md)"
    )


def gigabytes(nbytes: float) -> str:
    """1.5 GB, of 10^9 bytes each."""
    return f"{nbytes / 1e9:.1f} GB"
