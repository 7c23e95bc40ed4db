"""Conformance of a training backend on simulated GPUs and ranks.

Every case is a layout of up to many ranks, of which one runs, with 7B's widths. The device has no
values, so these tests say nothing about numbers: they see tensors on the wrong device, whole models
where shards should be, gradients that stay whole, and bytes that move without need.

They change the process (PyTorch has one device of this kind), so they run separately from others:
`make test-fake` for ours.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from hybridflow.core.contracts.training import OptimizerConfig, TrainingBackend
from hybridflow.core.values.model import ModelConfig
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.fakes.device import NAME
from hybridflow.kit.fakes.folder import write_hollow_folder
from hybridflow.kit.fakes.rehearsal import MicroBatches, PhaseMemory, Rehearsal, rehearsed
from hybridflow.kit.testing.checks import require
from hybridflow.settle.models import resolve_model

LAYERS = 4
FIELDS: dict[str, Any] = dict(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
"""The widths of Qwen2.5-7B."""
SEVERAL = 8
"""Micro-batches of the second update."""
SLACK = 2 << 20
"""Bytes that no bound counts: buffers, row counts, scalars."""
MOST_SAVED = 600 << 20
"""Ranks that hold more bytes than this are not saved, which would take long."""


@attrs.frozen(kw_only=True)
class FakeCase:
    """A layout and settings, with the memory that a rank is expected to hold."""

    layout: ParallelLayout
    config: Any
    shards: int
    """The number of ranks that share one copy of the weights."""
    weight_bytes: float
    """Bytes of a held parameter, between updates, without its moments."""
    moment_bytes: float = 8.0
    """Bytes of a held parameter's optimizer state on the device."""
    optimizer_shards: int | None = None
    """The number of ranks that share the optimizer's state; None: `shards`."""
    gathered: float = 0.0
    """Bytes per parameter of the whole model that stay gathered between micro-batches."""
    outside_gathered: float = 0.0
    """Bytes per parameter outside the layers (embedding, head) that stay gathered between
    micro-batches."""
    gradient_bytes: float = 4.0
    """Bytes of a held parameter's gradient."""
    kept_gradient_bytes: float = 0.0
    """Bytes of a held parameter's gradient buffer, where it stays between updates."""
    moments_at_build: bool = False
    """Whether the optimizer's state, and such buffers, are made before the first step."""
    kind: str = "policy"
    trained: bool = True
    moves: bool = True
    """Whether `offload` moves what is on the device."""
    saves: bool = True
    """Whether saving runs without the other ranks."""
    step_waits: int = 1
    """How often the host may wait for the device in an optimizer step: the norm is read."""

    @property
    def resident(self) -> bool:
        """Whether weights are on the device between calls."""
        return bool(self.weight_bytes)


@attrs.frozen
class Lived:
    """A case, and the record of its rehearsal."""

    case: FakeCase
    record: Rehearsal

    def __getitem__(self, phase: str) -> PhaseMemory:
        return self.record.phases[phase]

    @property
    def weights(self) -> float:
        """Bytes of one rank's weights, by the case."""
        return self.record.parameters / self.case.shards * self.case.weight_bytes

    @property
    def kept_gradients(self) -> float:
        """Bytes of one rank's gradient buffers between updates, by the case."""
        return self.record.parameters / self.case.shards * self.case.kept_gradient_bytes

    @property
    def moments(self) -> float:
        """Bytes of one rank's optimizer state, by the case."""
        if not self.case.trained:
            return 0.0
        shards = self.case.optimizer_shards or self.case.shards
        return self.record.parameters / shards * self.case.moment_bytes


class FakeGPUConformance:
    """Subclass it, and give `backend` and `cases`."""

    backend: type[TrainingBackend]
    cases: Mapping[str, FakeCase]
    """Name -> case."""
    layers = LAYERS
    """Layers of the model."""

    @pytest.fixture(scope="class")
    def lived(self, request, tmp_path_factory) -> Lived:
        """The case's rehearsal, run once for all tests of the case."""
        case = type(self).cases[request.param]
        folder = hollow_model(tmp_path_factory.getbasetemp(), self.layers)
        return Lived(case, live(self.backend, case, folder))

    def pytest_generate_tests(self, metafunc) -> None:
        """Run every test on every case."""
        if "lived" in metafunc.fixturenames:
            metafunc.parametrize("lived", list(self.cases), indirect=True, scope="class")

    # --- what is built ---

    def test_weights_are_on_the_device(self, lived):
        """Shards are on the device, or on the host where the settings say so."""
        expected = {NAME if lived.case.resident else "cpu"}
        require(
            lived.record.devices == expected,
            got=f"weights on {sorted(lived.record.devices)}",
            expected=f"weights on {sorted(expected)}",
            likely="a parameter or buffer is made on the CPU and not moved to context.device",
        )

    def test_a_rank_holds_its_shard_alone(self, lived):
        """Between updates a rank holds its share of weights and moments, within 5%."""
        expected = (lived.weights + lived.kept_gradients + lived.moments) * 1.05 + SLACK
        end = "several: step" if lived.case.trained else "build"
        require(
            lived[end].after <= expected,
            got=f"{_gb(lived[end].after)} at rest",
            expected=f"at most {_gb(expected)}: 1/{lived.case.shards} of the model, and 5%",
            likely="whole parameters, gradients or gathered weights stay in memory",
        )

    def test_no_rank_builds_the_whole_model(self, lived):
        """While it is built, no more than the rank's shard is on the device."""
        made = lived.weights
        if lived.case.moments_at_build:
            # A parameter is copied into a flat buffer while the first copy is there.
            largest = 2.0 * FIELDS["vocab_size"] * FIELDS["hidden_size"]
            made += lived.kept_gradients + lived.moments + largest / lived.case.shards
        expected = made * 1.05 + SLACK
        require(
            lived["build"].peak <= expected,
            got=f"{_gb(lived['build'].peak)} at the peak of build",
            expected=f"at most {_gb(expected)}",
            likely="the model is built on the device, or whole on the host, before it is cut: "
            "build it on meta and read boxes (kit/huggingface/loading.py)",
        )

    # --- updates ---

    def test_gradients_are_cut_in_each_micro_batch(self, lived):
        """Several micro-batches take no more memory than one, except for the shards' gradients."""
        if not lived.case.trained:
            pytest.skip("it does not train")
        case = lived.case
        outside = 2.0 * FIELDS["vocab_size"] * FIELDS["hidden_size"]
        # With several micro-batches the shard's gradients stay, and gathered weights.
        held = lived.record.parameters / case.shards * case.gradient_bytes
        kept = case.gathered * lived.record.parameters + case.outside_gathered * outside
        allowed = lived.moments + held + kept + SLACK
        more = lived["several"].peak - lived["one"].peak
        require(
            more <= allowed,
            got=f"{SEVERAL} micro-batches take {_gb(more)} more than one",
            expected=f"at most {_gb(allowed)}: the shard's gradients, moments, and what stays "
            "gathered",
            likely="gradients of the whole model add up on every rank until the last micro-batch",
        )

    def test_the_host_waits_for_no_micro_batch(self, lived):
        """The host queues all passes, and reads of an update the gradient's norm alone."""
        if not lived.case.resident:
            pytest.skip("its gradients go to the host")
        phases = ["forward"] if lived.case.moves else []
        if lived.case.trained:
            phases += ["one", "several"]
        for phase in phases:
            require(
                lived[phase].waits == 0,
                got=f"the host waits {lived[phase].waits} times in {phase!r}",
                expected="no wait: the device is kept busy by what is queued ahead",
                likely=".item(), .tolist() or .cpu() of a tensor on the device, or an `if` on one",
            )
        if not lived.case.trained:
            return
        waits = lived["several: step"].waits
        require(
            waits <= lived.case.step_waits,
            got=f"the host waits {waits} times in an optimizer step",
            expected=f"at most {lived.case.step_waits}",
            likely="a norm is read for each parameter or group; add them up on the device",
        )

    # --- beside others ---

    def test_offload_leaves_nothing(self, lived):
        """After offload no byte of the model is on the device."""
        if not lived.case.moves:
            pytest.skip("it does not move")
        require(
            lived["away"].after <= SLACK / 4,
            got=f"{lived['away'].after} bytes after offload",
            expected="none",
            likely="masters, buffers, gradients or moments stay: they are reached by another name",
        )

    def test_a_forward_pass_moves_no_moment(self, lived):
        """A forward beside others brings the weights, and copies nothing out."""
        if not lived.case.moves:
            pytest.skip("it does not move")
        # Weights come, and nothing goes.
        arrived = lived["forward: onload"].arrived
        require(
            arrived <= lived.weights * 1.05 + SLACK,
            got=f"{_gb(arrived)} arrive for a forward pass",
            expected=f"at most {_gb(lived.weights * 1.05)}: the weights",
            likely='onload(("weights",)) brings the optimizer too',
        )
        left = lived["forward: offload"].left
        require(
            left <= SLACK,
            got=f"{_gb(left)} leave after a forward pass",
            expected="nothing: the host's copy is still right",
            likely="offload copies values that have not changed",
        )

    def test_an_update_moves_each_byte_once(self, lived):
        """An update beside others moves weights and moments in once, and out once."""
        if not lived.case.moves or not lived.case.trained:
            pytest.skip("it does not move, or is not trained")
        expected = (lived.weights + lived.moments) * 1.05 + SLACK
        for phase, moved in (
            ("update: onload", lived["update: onload"].arrived),
            ("update: offload", lived["update: offload"].left),
        ):
            require(
                moved <= expected,
                got=f"{_gb(moved)} in {phase!r}",
                expected=f"at most {_gb(expected)}",
                likely="parts move twice, or gradients move too",
            )

    # --- leaving the rank ---

    def test_a_sync_reads_shards(self, lived):
        """Reading every box for engines gathers no whole model."""
        phase = lived["sync"]
        allowed = max(lived.weights, SLACK) + SLACK
        require(
            phase.peak - phase.before <= allowed,
            got=f"{_gb(phase.peak - phase.before)} more while shards are read",
            expected=f"at most {_gb(allowed)}",
            likely="named_shards gathers or copies all parameters before the first is asked for",
        )

    def test_saving_and_loading_need_no_second_model(self, lived):
        """A checkpoint takes this rank's bytes once each way, and its memory not twice."""
        if "disk: save" not in lived.record.phases:
            pytest.skip("this rank's part is too large to write in a test, or needs the others")
        # A checkpoint holds weights and moments.
        once = (lived.weights + lived.moments) * 1.05 + SLACK
        save = lived["disk: save"]
        load = lived["disk: load"]
        for phase, moved, growth in (
            ("save", save.left, save.peak - save.before),
            ("load", load.arrived, load.peak - load.before),
        ):
            require(
                moved <= once and growth <= once / 2 + SLACK,
                got=f"{phase} moves {_gb(moved)} and takes {_gb(growth)} beside",
                expected=f"at most {_gb(once)}, and half of it beside",
                likely="state is gathered or cloned on the device",
            )


def hollow_model(root: Path, layers: int) -> Path:
    """Return a folder with a model of 7B's widths, made once per folder of tests."""
    folder = root / f"hollow-{layers}"
    if not folder.exists():
        write_hollow_folder(folder, {**FIELDS, "num_hidden_layers": layers})
    return folder


def live(backend: type[TrainingBackend], case: FakeCase, folder: Path) -> Rehearsal:
    """Run all phases of a case, and return the record."""
    spec = resolve_model(ModelConfig(path=str(folder)), case.kind, "fake")
    optimizer = OptimizerConfig() if case.trained else None
    # Few tokens: activations are not what these tests look at.
    few = MicroBatches()
    with rehearsed(backend, spec, case.config, optimizer, case.layout) as run:
        if case.trained:
            run.update("one", few)
            run.update("several", attrs.evolve(few, count=SEVERAL))
        # A sync to engines, then calls beside other roles, then files.
        run.sync("sync")
        if case.moves:
            run.offload("away")
            run.onload("forward: onload", ("weights",))
            run.forward("forward", few)
            run.offload("forward: offload", ("weights",))
            run.onload("update: onload")
            if case.trained:
                run.update("update", few)
            run.offload("update: offload")
            run.onload("back")
        state = run.phases["sync"].before
        if case.trained and case.saves and state <= MOST_SAVED:
            run.save_and_load("disk")
        # The last look, while everything is on the device.
        result = run.result()
    gc.collect()
    return result


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f} GB"
