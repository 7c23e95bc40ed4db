"""BackendWeights: a training backend's weights have canonical names, and survive files.

Canonical names and shapes are those of the safetensors that Hugging Face saves. Weights must come
back bit for bit from a checkpoint and from offloading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from hybridflow.core.contracts.training import OptimizerConfig, TrainingBackend
from hybridflow.core.errors import CheckpointError
from hybridflow.core.values.model import ModelConfig
from hybridflow.kit.testing.backend_base import LENGTHS, BackendBase, first_output
from hybridflow.kit.testing.checks import require, require_close, require_raises
from hybridflow.kit.testing.models import Reference, Sequences, tiny_config
from hybridflow.kit.testing.passes import Passes, memoryless, whole_weights
from hybridflow.settle.models import resolve_model


class BackendWeights(BackendBase):
    """Tests of names, layout, shards, checkpoints, export and offloading."""

    def test_weights_are_those_of_the_folder_under_their_names(self, build):
        """full_parameters has the names and values of the model's folder."""
        for ref in self.references():
            backend = build(ref.spec, None)
            weights = whole_weights(backend)
            self._names(weights, ref, "full_parameters")

            for name, expected in ref.parameters.items():
                require_close(
                    weights[name].float(),
                    expected,
                    self.weight_tolerance * float(expected.abs().max()),
                    what=name,
                    likely="the weights were converted wrongly (fused projections, transposed, "
                    "padded vocabulary) or not loaded",
                )

    def test_random_weights_follow_from_the_seed(self, build):
        """Equal values of init_seed give equal weights, and another value gives others."""
        kind = self.kinds[0]

        def weights(seed: int) -> dict[str, torch.Tensor]:
            """Return the initial weights of a backend that has no folder to load."""
            model = ModelConfig(config=tiny_config(self.architectures[0]), init_seed=seed)
            spec = resolve_model(model, kind, "test")
            return whole_weights(build(spec, None))

        first = weights(0)
        again = weights(0)
        other = weights(1)
        equal = all(torch.equal(first[name], again[name]) for name in first)
        # Constants, such as the weights of norms, are equal for all seeds.
        differ = any(first[name].ne(other[name]).any() for name in first)

        require(
            equal and differ,
            got=f"equal seeds {'the same' if equal else 'different'} weights, other seeds "
            f"{'others' if differ else 'the same'}",
            expected="weights that init_seed determines, on every rank",
            likely="the model is initialised from torch's global generator without seeding it by "
            "ModelSpec.init_seed",
        )

    def test_the_layout_and_the_shards_agree(self, build):
        """Shards hold their boxes' values, and the layout lists these boxes."""
        for ref in self.references():
            backend = build(ref.spec, None)
            layout = backend.layout()
            weights = whole_weights(backend)
            self._names(layout.params, ref, "layout().params")

            boxes: dict[str, list] = {}
            for name, box, tensor in backend.named_shards():
                boxes.setdefault(name, []).append(box)
                require(
                    tuple(tensor.shape) == box.shape
                    and torch.equal(tensor, weights[name][box.slices()]),
                    got=f"the shard of {name} at {box} has shape {tuple(tensor.shape)}",
                    expected=f"the values of that box of {name}, shape {box.shape}",
                    likely="boxes are in canonical (Hugging Face) coordinates and reach into no "
                    "padding",
                )

            # A test runs on one rank, which therefore holds each parameter completely.
            for name, param in layout.params.items():
                shape = tuple(weights[name].shape)
                held = layout.held[backend.context.rank].get(name, ())
                yielded = boxes.get(name, ())
                require(
                    sorted(map(str, held)) == sorted(map(str, yielded))
                    and param.shape == shape
                    and sum(box.numel for box in held) == weights[name].numel(),
                    got=f"{name}: layout holds {held}, named_shards gives {boxes.get(name)}",
                    expected=f"the same boxes, which on one rank make up the whole shape {shape}",
                    likely="layout() and named_shards() are computed in two ways, or a tied or "
                    "padded parameter is listed twice",
                )

    def test_shards_are_views_of_the_storage(self, build):
        """A value written into every shard shows in full_parameters."""
        backend = build(next(self.references()).spec, None)
        with torch.no_grad():
            for _, _, tensor in backend.named_shards():
                tensor.fill_(0.5)

        weights = backend.full_parameters()
        changed = all(bool((values == 0.5).all()) for _, values in weights)
        require(
            changed,
            got="a value written into a shard that full_parameters does not see",
            expected="views: weights go to an engine from the storage, without a copy",
            likely="named_shards yields copies (.clone(), .to(dtype), .contiguous() of a slice)",
        )

    def test_an_adopted_storage_holds_the_weights_from_then_on(self, build):
        """`adopt` copies the weights into the storage, and later steps change them there.

        A backend that adopts no storage is skipped.
        """
        self._needs_training()
        ref = next(self.references())
        backend = build(ref.spec, OptimizerConfig(lr=1e-2))
        before = {name: values.clone() for name, values in whole_weights(backend).items()}
        adopted = _adopted_storages(backend, before)
        if not adopted:
            pytest.skip("it adopts no storage")

        # The storage must have the weights at once, and what a step makes of them.
        wrong = list(_differing(adopted, before))
        rows = Sequences.random(LENGTHS, seed=5)
        Passes(backend, rows, seed=5).backward(first_output(ref))
        backend.optim_step()
        after = whole_weights(backend)
        behind = list(_differing(adopted, after))

        # The comparisons mean nothing if the step changed no weight.
        initial = {name: before[name] for name in adopted}
        moved = any(_differing(initial, after))
        require(
            not wrong and not behind and moved,
            got=f"{len(wrong)} adopted storages without the weights' values {wrong[:3]}; after a "
            f"step {len(behind)} differ from the weights {behind[:3]}; the step changed "
            f"{'them' if moved else 'none of them'}",
            expected="the present values in the storage, and every later change",
            likely="adopt copies the storage instead of using it, or the optimizer goes on with "
            "the old one",
        )

    def test_a_saved_backend_goes_on_bit_for_bit(self, build, tmp_path):
        """Two steps, a checkpoint and two steps give the weights of four steps."""
        self._needs_training()
        ref = next(self.references())
        config = OptimizerConfig(lr=1e-2, warmup_steps=4, weight_decay=0.01)
        needs = first_output(ref)
        rows = Sequences.random(LENGTHS, seed=11)

        def train(backend: TrainingBackend, steps: int) -> TrainingBackend:
            """Take `steps` steps on the same rows, and return the backend."""
            for _ in range(steps):
                Passes(backend, rows, seed=11).backward(needs)
                backend.optim_step()
            return backend

        # The schedule still warms up when the checkpoint is written.
        uninterrupted = train(build(ref.spec, config), 2)
        (tmp_path / "saved").mkdir()
        # What is written is the state as it was, although training goes on.
        writing = uninterrupted.save(tmp_path / "saved")
        train(uninterrupted, 2)
        if writing is not None:
            writing.done(wait=True)

        resumed = build(ref.spec, config)
        resumed.load(tmp_path / "saved")
        version = resumed.version
        train(resumed, 2)

        weights = whole_weights(resumed)
        differing = [
            name
            for name, expected in uninterrupted.full_parameters()
            if not torch.equal(expected, weights[name])
        ]
        require(
            version == 2 and not differing,
            got=f"version {version} after load; after two more steps {len(differing)} parameters "
            f"differ: {differing[:3]}",
            expected="version 2, and the same bits as without the interruption",
            likely="the optimizer's moments or step count, the schedule's position or the version "
            "are not saved",
        )

    def test_loading_what_is_not_there_says_so(self, build, tmp_path):
        """`load` of a missing folder raises a CheckpointError that names the folder."""
        backend = build(next(self.references()).spec, None)
        error = require_raises(
            lambda: backend.load(tmp_path / "nothing"),
            CheckpointError,
            what="load of a missing folder",
            likely="a missing checkpoint must not leave fresh weights in place without a word",
        )
        require(
            "nothing" in str(error),
            got=f"the error {str(error)!r:.200}",
            expected="the folder in the message",
            likely="raise CheckpointError with the folder, the role and the cause",
        )

    def test_the_export_loads_in_hugging_face(self, build, tmp_path):
        """transformers' auto classes read the names and values of the reference back."""
        for i, ref in enumerate(self.references()):
            backend = build(ref.spec, None)
            folder = tmp_path / str(i)
            backend.export_hf(folder)

            loaded = _hugging_face_parameters(ref, folder)
            for name, expected in ref.parameters.items():
                require(
                    name in loaded,
                    got=f"an export of {self._name(ref)} that has no {name} (it has "
                    f"{', '.join(list(loaded)[:4])}, ...)",
                    expected="Hugging Face's names",
                    likely="wrapper prefixes are left in the names (module., _orig_mod., hf.)",
                )
                require_close(
                    loaded[name].float(),
                    expected,
                    self.weight_tolerance * float(expected.abs().max()),
                    what=f"exported {name}",
                    likely="weights are converted wrongly on their way out, or the export holds "
                    "one rank's shard",
                )

    def test_weights_survive_offloading(self, build):
        """Weights are equal bit for bit after offload and onload."""
        ref = next(self.references())
        backend = build(ref.spec, memoryless() if self.trains else None)
        before = whole_weights(backend)
        backend.offload()
        backend.onload()

        differing = [
            name
            for name, values in backend.full_parameters()
            if not torch.equal(values.detach(), before[name])
        ]
        require(
            not differing,
            got=f"other weights after offload and onload: {differing[:3]}",
            expected="the same bits",
            likely="offload drops what onload does not bring back",
        )


def _adopted_storages(
    backend: TrainingBackend, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Offer the backend zeros as storage of each parameter, and return those that it adopts."""
    device = backend.context.device
    offered = {}
    for name, values in weights.items():
        offered[name] = torch.zeros(values.shape, dtype=values.dtype, device=device)
    return {name: storage for name, storage in offered.items() if backend.adopt(name, storage)}


def _differing(
    storages: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield the names of the storages that do not have the weights' values."""
    for name, storage in storages.items():
        if not torch.equal(storage.cpu(), weights[name].cpu()):
            yield name


def _hugging_face_parameters(ref: Reference, folder: Path) -> dict[str, torch.Tensor]:
    """Return the named parameters of the model that transformers loads from the folder."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForCausalLM if ref.spec.kind == "policy" else AutoModelForSequenceClassification
    loaded = auto.from_pretrained(Path(folder))
    return ref.saved({name: values.detach() for name, values in loaded.named_parameters()})
