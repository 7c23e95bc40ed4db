"""Clusters: nodes of devices, with their data sheets and efficiencies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean
from hybridflow.core.validators import at_least, fraction, non_negative, share, validator
from hybridflow.settle.config.load import load_toml
from hybridflow.settle.config.structure import Problem, structure

GB = 1e9
"""Bytes of a gigabyte, everywhere in the planner."""
positive_figure = validator(
    lambda value: 0 < value < float("inf"),
    "above 0 and finite",
    "give the figure of the data sheet",
)
"""0 < value < infinity."""


@attrs.frozen
class Device:
    """One accelerator as its data sheet describes it; in a cluster's file [devices.NAME]."""

    memory_gb: float = attrs.field(validator=positive_figure)
    """Size of its memory, in 10^9 bytes."""
    tflops: float = attrs.field(validator=positive_figure)
    """Dense matrix products in bf16, in 10^12 operations per second."""
    bandwidth_gbs: float = attrs.field(validator=positive_figure)
    """Bandwidth of its memory, in 10^9 bytes per second."""
    link_gbs: float = attrs.field(validator=positive_figure)
    """Bandwidth to the other devices of its node, in 10^9 bytes per second and direction."""
    host_gbs: float = attrs.field(default=25.0, validator=positive_figure)
    """Bandwidth to the memory of its host, for offloading, in 10^9 bytes per second."""
    fp8_tflops: float | None = attrs.field(default=None, validator=positive_figure)
    """Dense matrix products in fp8, in 10^12 operations per second; none: it has no fp8."""
    fp32_tflops: float | None = attrs.field(default=None, validator=positive_figure, kw_only=True)
    """Matrix products in float32 without TF32, in 10^12 per second; none: the same as `tflops`."""
    name: str = attrs.field(default="", kw_only=True)


def _known(*rows: tuple[Any, ...]) -> dict[str, Device]:
    """Return the devices of a table, by name.

    Columns: name, memory_gb, tflops, fp32_tflops, bandwidth_gbs, link_gbs, and where they differ
    from the defaults host_gbs and fp8_tflops.
    """
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
"""Figures of data sheets: memory, dense bf16 (V100: fp16), float32, memory bandwidth, link per
direction (half of what NVLink sheets state, which count both directions), host link, fp8."""


@attrs.frozen
class Efficiency:
    """Achieved fractions of data-sheet peaks, and fixed times per message, layer, sequence or call.

    One set holds for a kind of device, for all models.
    """

    training: float = attrs.field(default=0.5, validator=fraction)
    """Achieved fraction of the matrix products' peak in training."""
    inference: float = attrs.field(default=0.5, validator=fraction)
    """Achieved fraction of the matrix products' peak in a forward pass, also of a prompt."""
    memory: float = attrs.field(default=0.8, validator=fraction)
    """Achieved fraction of the memory's bandwidth when decoding."""
    optimizer: float = attrs.field(default=0.8, validator=fraction)
    """Achieved fraction of the memory's bandwidth in an optimizer step."""
    link: float = attrs.field(default=0.8, validator=fraction)
    """Achieved fraction of the bandwidth of links inside a node."""
    network: float = attrs.field(default=0.8, validator=fraction)
    """Achieved fraction of the bandwidth of links between nodes."""
    overlap: float = attrs.field(default=0.0, validator=share)
    """Share of the reduction of gradients that hides behind the backward pass."""
    usable: float = attrs.field(default=0.9, validator=fraction)
    """Usable share of the memory: not lost to fragmentation, communication library and context."""
    link_latency_us: float = attrs.field(default=3.0, validator=non_negative)
    """Microseconds of one message of a collective inside a node."""
    network_latency_us: float = attrs.field(default=20.0, validator=non_negative)
    """Microseconds of one message of a collective between nodes."""
    decode_step_us: float = attrs.field(default=0.0, validator=non_negative)
    """Fixed microseconds of a decoding step, for launches."""
    decode_layer_us: float = attrs.field(default=0.0, validator=non_negative)
    """Fixed microseconds of each layer of a decoding step."""
    decode_tp_layer_us: float = attrs.field(default=0.0, validator=non_negative)
    """Extra microseconds per layer of a decoding step under tensor parallelism."""
    eager_layer_us: float = attrs.field(default=300.0, validator=non_negative)
    """Microseconds in which the host launches a layer of a decoding step without CUDA graphs, while
    the device works. For a measured engine the figures above include it."""
    sequence_us: float = attrs.field(default=25.0, validator=non_negative)
    """Microseconds of the engine's work (scheduling, sampling) per sequence and decoding step."""
    micro_batch_us: float = attrs.field(default=0.0, validator=non_negative)
    """Fixed microseconds of a layer's forward pass over a micro-batch, for launches."""
    tp_layer_us: float = attrs.field(default=0.0, validator=non_negative)
    """Extra microseconds per layer and micro-batch under tensor parallelism."""
    activation_passes: float = attrs.field(default=0.0, validator=non_negative)
    """How often a layer's hidden states go through the memory in a forward pass, beside its matrix
    products (norms, rotations, residuals). 0 where `training` and `inference` include it."""
    logit_passes: float = attrs.field(default=0.0, validator=non_negative)
    """How often the float32 logits go through the memory in a forward pass, beside the head's
    matrix product. 0 where `training` and `inference` include it."""
    update_ms: float = attrs.field(default=0.0, validator=non_negative)
    """Fixed milliseconds of an update."""
    call_ms: float = attrs.field(default=0.0, validator=non_negative)
    """Fixed milliseconds of one forward pass or generation of a role, for dispatch."""
    sync_ms: float = attrs.field(default=0.0, validator=non_negative)
    """Fixed milliseconds of one transition of weights to the engine."""


@attrs.frozen
class RunsOn:
    """The software and precision that measured times hold for."""

    backend: str
    engine: str | None
    bits: int = 0
    """Width of the numbers that are computed with; 0: not known."""


@attrs.frozen
class Nodes:
    """A number of equal machines, their devices and what joins them."""

    device: Device
    count: int = attrs.field(validator=at_least(1))
    """Number of machines."""
    per_node: int = attrs.field(validator=at_least(1))
    """Devices of one machine."""
    between_gbs: float = attrs.field(validator=positive_figure)
    """Bandwidth of one machine to the others, in 10^9 bytes per second and direction."""
    efficiency: Efficiency = attrs.field(factory=Efficiency)
    given: bool = False
    """Whether a cluster's file gives the efficiencies."""
    measured: RunsOn | None = None
    """Software with which `hybridflow calibrate` measured the efficiencies; None: not measured."""

    @property
    def devices(self) -> int:
        """Number of devices of all machines."""
        return self.count * self.per_node

    @property
    def figures(self) -> str:
        """The source of the efficiencies: "measured", "given" in a file, or "tabled" defaults."""
        if self.measured:
            return "measured"
        return "given" if self.given else "tabled"

    @property
    def memory(self) -> float:
        """Usable bytes of one device."""
        return self.device.memory_gb * GB * self.efficiency.usable

    def sizes(self) -> list[int]:
        """Numbers of devices that a pool may have, ascending: parts of a node, and whole nodes.

        Parts are halves, halves of these and so on (where 2 does not divide, the smallest factor
        counts). Each part divides the next, so parts of a node always pack. For 8 devices: 1, 2, 4;
        then 8, 16, ...
        """
        parts = []
        size = self.per_node
        # Divide by the smallest factor until one device is left.
        while size > 1:
            size //= next(f for f in range(2, size + 1) if size % f == 0)
            parts.append(size)
        return [*reversed(parts), *range(self.per_node, self.devices + 1, self.per_node)]


@attrs.frozen
class Cluster:
    """One or several kinds of nodes; a pool never mixes kinds."""

    nodes: tuple[Nodes, ...]

    def __attrs_post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError(
                "the cluster has no device; give it [[nodes]] with device, count and per_node"
            )

    @property
    def devices(self) -> int:
        """Number of devices of all nodes."""
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
        """`count` machines of one known kind. Raises ConfigError for a kind not in the table."""
        sheet = known_device(device, {})
        nodes = Nodes(sheet, count, per_node, between_gbs, efficiency or Efficiency())
        return cls((nodes,))

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Return the cluster of a TOML file (docs/mapping.md). Raises ConfigError with all
        problems.
        """
        return cls.from_tables(load_toml(path), str(path))

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], where: str = "cluster") -> Cluster:
        """Return the cluster of a file's tables.

        Raises ConfigError with all problems; `where` names the file in front of each.
        """
        # A file with wrong keys or types has no sections to look at.
        wrong: list[Problem] = []
        file = structure(dict(tables), ClusterFile, problems=wrong)
        if file is None:
            raise ConfigError([f"{where}: {problem}" for problem in wrong])
        problems: list[str] = []

        # Devices of the file come before known ones of the same name.
        kinds: list[Nodes] = []
        own = {}
        for name, sheet in file.devices.items():
            own[name] = attrs.evolve(sheet, name=name)
        for i, section in enumerate(file.nodes):
            try:
                device = known_device(section.device, own)
            except ConfigError as error:
                problems += [f"{where}: nodes.{i}.device: {p}" for p in error.problems]
            else:
                kinds.append(_nodes(file, section, device))

        problems += [f"{where}: {problem}" for problem in _table_problems(file)]
        if problems:
            raise ConfigError(problems)
        return cls(tuple(kinds))

    def sized(self, devices: int) -> Cluster:
        """Return a cluster of `devices` devices of the same kind: whole nodes, or a part of one.

        Raises ConfigError for other numbers, and for a cluster with nodes of several kinds.
        """
        # With several kinds it is not defined which one should grow.
        if len(self.nodes) > 1:
            raise ConfigError(
                f"the cluster has {len(self.nodes)} kinds of nodes; other sizes can be asked of "
                "one kind"
            )
        [nodes] = self.nodes
        if devices < 1 or (devices > nodes.per_node and devices % nodes.per_node):
            raise ConfigError(
                f"{devices} devices are not whole nodes of {nodes.per_node}; give a multiple of "
                "that"
            )

        # A part of one node, or some of the nodes.
        if devices <= nodes.per_node:
            return Cluster((attrs.evolve(nodes, count=1, per_node=devices),))
        return Cluster((attrs.evolve(nodes, count=devices // nodes.per_node),))


@attrs.frozen
class NodesSection:
    """[[nodes]] of a cluster file: a number of equal machines."""

    device: str
    """Name of the device, in the table of known devices or in [devices.NAME]."""
    count: int = attrs.field(default=1, validator=at_least(1))
    """Number of machines."""
    per_node: int = attrs.field(default=8, validator=at_least(1))
    """Devices of one machine."""
    between_gbps: float = attrs.field(default=200.0, validator=positive_figure)
    """Bandwidth of one machine to the others, in 10^9 bits per second and direction."""


@attrs.frozen
class MeasuredSection:
    """[measured.NAME]: how a device's efficiencies were measured."""

    backend: str
    """The training backend."""
    engine: str
    """The rollout engine."""
    bits: int = attrs.field(default=0, validator=attrs.validators.in_((0, 8, 16, 32)))
    """Width of the numbers that were computed with; 0: not known."""
    on: str = ""
    """Date, devices and versions."""
    error: float = attrs.field(default=0.0, validator=non_negative)
    """Mean relative error of the simulators on the calibration's own samples."""


@attrs.frozen
class ClusterFile:
    """The tables that a cluster file may have."""

    nodes: tuple[NodesSection, ...] = ()
    """Kinds of machines."""
    devices: dict[str, Device] = attrs.field(factory=dict)
    """Data sheets of devices that are not in the table, by name."""
    efficiency: dict[str, Efficiency] = attrs.field(factory=dict)
    """Efficiencies by device; a device without any has the defaults."""
    measured: dict[str, MeasuredSection] = attrs.field(factory=dict)
    """How the efficiencies were measured, by device; `hybridflow calibrate` writes it."""


def _nodes(file: ClusterFile, section: NodesSection, device: Device) -> Nodes:
    """Return the machines of one [[nodes]] table, with the file's efficiencies of their device."""
    measured = file.measured.get(section.device)
    return Nodes(
        device,
        section.count,
        section.per_node,
        section.between_gbps / 8,  # bits to bytes
        file.efficiency.get(section.device, Efficiency()),
        section.device in file.efficiency,
        RunsOn(measured.backend, measured.engine, measured.bits) if measured else None,
    )


def _table_problems(file: ClusterFile) -> list[str]:
    """Return the problems between the tables of a file, each of which is valid alone."""
    problems = []
    if not file.nodes:
        problems.append(
            "the cluster has no device; give it [[nodes]] with device, count and per_node"
        )
    for name in file.measured:
        if name not in file.efficiency:
            problems.append(
                f"measured.{name}: there is no [efficiency.{name}]; calibrate writes both"
            )

    # Efficiencies that nothing uses are a mistake in a name.
    names = {section.device for section in file.nodes}
    for name in file.efficiency:
        if name not in names:
            problems.append(f"efficiency.{name}: no [[nodes]] are of this device")
    return problems


def known_device(name: str, own: Mapping[str, Device]) -> Device:
    """Return the device of this name, in `own` or in the table. Raises ConfigError.

    The memory may be left out of a name that only one device has: "h100" is the "h100-80gb".
    """
    devices = {**DEVICES, **own}
    if name not in devices:
        of_this_name = [other for other in devices if other.startswith(f"{name}-")]
        if len(of_this_name) == 1:
            return devices[of_this_name[0]]
        if of_this_name:
            raise ConfigError(f"which {name}? There are {' and '.join(of_this_name)}")
        raise ConfigError(
            f"no device is called {name!r}{did_you_mean(name, devices)} "
            f"(known: {', '.join(devices)}); describe it in "
            f"[devices.{name}] with memory_gb, tflops, bandwidth_gbs and link_gbs"
        )
    return devices[name]


def device_called(text: str) -> Device | None:
    """Return the known device that a driver calls `text`, such as "NVIDIA A100-SXM4-80GB", or None.

    Of devices that differ in their memory alone, the one whose memory the text names comes first.
    """
    # Names of the table are NAME-MEMORY: "a100-80gb" is the A100 of a driver's text with 80GB.
    words = set(re.split(r"[^a-z0-9]+", text.lower().replace("rtx 4090", "rtx4090")))
    devices = [device for name, device in DEVICES.items() if name.rpartition("-")[0] in words]
    exact = [device for device in devices if device.name.rpartition("-")[2] in words]
    return next(iter(exact or devices), None)


SHORT = re.compile(r"([\w.-]+):(?:(\d+)x)?(\d+)(?:@(\d+(?:\.\d+)?))?")
"""A cluster in a word: DEVICE:[NODESx]DEVICES[@GBIT/S]."""


def read_cluster(text: str) -> Cluster:
    """Return the cluster of a TOML file, or of DEVICE:[NODESx]DEVICES[@GBIT/S].

    Examples of the latter are "a100-80gb:2x8", "h100-80gb:16x8@3200", and "h100:8" for one node.
    Raises ConfigError.
    """
    if Path(text).exists():
        return Cluster.read(text)

    # A text becomes the table that a file would have.
    match = SHORT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"the cluster {text!r} is no file, and not DEVICE:[NODESx]DEVICES[@GBIT/S]; write "
            "a-cluster.toml, or h100:8, or h100-80gb:2x8@3200 (docs/mapping.md)"
        )
    device, count, per_node, between = match.groups()
    nodes = {"device": device, "count": int(count or 1), "per_node": int(per_node)}
    if between:
        nodes["between_gbps"] = float(between)
    return Cluster.from_tables({"nodes": [nodes]}, "--cluster")


def gigabytes(nbytes: float) -> str:
    """Return the bytes as text: "1.5 GB", of 10^9 bytes each."""
    return f"{nbytes / 1e9:.1f} GB"
