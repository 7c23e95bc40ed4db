"""A backend's weights are where it says, under Hugging Face's names, and survive files and offloading bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.core.contracts.training import OptimizerConfig, TrainingBackend
from hybridflow.core.errors import CheckpointError
from hybridflow.core.job.models import resolve_model
from hybridflow.core.values.model import ModelConfig
from hybridflow.kit.testing.backend_base import LENGTHS, TOKEN_OUTPUTS, BackendBase
from hybridflow.kit.testing.checks import require, require_close, require_raises
from hybridflow.kit.testing.models import Sequences, tiny_config
from hybridflow.kit.testing.passes import Passes, memoryless, whole_weights


class BackendWeights(BackendBase):
    """Names, layout, shards, checkpoints, export, offloading."""

    def test_weights_are_those_of_the_folder_under_their_names(self, build):
        for ref in self.references():
            backend = build(ref.spec, None)
            found = whole_weights(backend)
            self._names(found, ref, "full_parameters")
            for name, expected in ref.parameters.items():
                require_close(
                    found[name].float(),
                    expected,
                    self.weight_tolerance * float(expected.abs().max()),
                    what=name,
                    likely="the weights were converted wrongly (fused projections, transposed, padded vocabulary) or "
                    "not loaded",
                )

    def test_random_weights_follow_from_the_seed(self, build):
        kind = self.kinds[0]

        def weights(seed: int) -> dict[str, torch.Tensor]:
            spec = resolve_model(
                ModelConfig(config=tiny_config(self.architectures[0]), init_seed=seed), kind, "test"
            )
            return whole_weights(build(spec, None))

        first, again, other = weights(0), weights(0), weights(1)
        equal, differ = (
            all(torch.equal(first[n], again[n]) for n in first),
            any(first[n].ne(other[n]).any() for n in first),
        )
        require(
            equal and differ,
            got=f"equal seeds {'the same' if equal else 'different'} weights, other seeds "
            f"{'others' if differ else 'the same'}",
            expected="weights that init_seed determines, on every rank",
            likely="the model is initialised from torch's global generator without seeding it by ModelSpec.init_seed",
        )

    def test_the_layout_and_the_shards_agree(self, build):
        for ref in self.references():
            backend = build(ref.spec, None)
            layout, whole = backend.layout(), whole_weights(backend)
            self._names(layout.params, ref, "layout().params")
            shards: dict[str, list] = {}
            for name, box, tensor in backend.named_shards():
                shards.setdefault(name, []).append(box)
                require(
                    tuple(tensor.shape) == box.shape
                    and torch.equal(tensor, whole[name][box.slices()]),
                    got=f"the shard of {name} at {box} has shape {tuple(tensor.shape)}",
                    expected=f"the values of that box of {name}, shape {box.shape}",
                    likely="boxes are in canonical (Hugging Face) coordinates and reach into no padding",
                )
            for name, param in layout.params.items():
                held = layout.held[backend.context.rank].get(name, ())
                require(
                    sorted(map(str, held)) == sorted(map(str, shards.get(name, ())))
                    and param.shape == tuple(whole[name].shape)
                    and sum(box.numel for box in held) == whole[name].numel(),
                    got=f"{name}: layout holds {held}, named_shards gives {shards.get(name)}",
                    expected=f"the same boxes, which on one rank make up the whole shape {tuple(whole[name].shape)}",
                    likely="layout() and named_shards() are computed in two ways, or a tied or padded parameter is "
                    "listed twice",
                )

    def test_shards_are_views_of_the_storage(self, build):
        backend = build(next(self.references()).spec, None)
        with torch.no_grad():
            for _, _, tensor in backend.named_shards():
                tensor.fill_(0.5)
        changed = all(bool((p == 0.5).all()) for _, p in backend.full_parameters())
        require(
            changed,
            got="a value written into a shard that full_parameters does not see",
            expected="views: weights go to an engine from the storage, without a copy",
            likely="named_shards yields copies (.clone(), .to(dtype), .contiguous() of a slice)",
        )

    def test_an_adopted_storage_holds_the_weights_from_then_on(self, build):
        """Skipped by a backend that adopts nothing."""
        self._needs_training()
        ref = next(self.references())
        backend = build(ref.spec, OptimizerConfig(lr=1e-2))
        device, before = (
            backend.context.device,
            {n: p.clone() for n, p in whole_weights(backend).items()},
        )
        offered = {n: torch.zeros(p.shape, dtype=p.dtype, device=device) for n, p in before.items()}
        adopted = {n: storage for n, storage in offered.items() if backend.adopt(n, storage)}
        if not adopted:
            pytest.skip("it adopts no storage")
        wrong = [
            n for n, storage in adopted.items() if not torch.equal(storage.cpu(), before[n].cpu())
        ]
        Passes(backend, Sequences.random(LENGTHS, seed=5), seed=5).backward(
            [TOKEN_OUTPUTS[ref.spec.kind][0]]
        )
        backend.optim_step()
        after = whole_weights(backend)
        behind = [
            n for n, storage in adopted.items() if not torch.equal(storage.cpu(), after[n].cpu())
        ]
        moved = any(not torch.equal(after[n].cpu(), before[n].cpu()) for n in adopted)
        require(
            not wrong and not behind and moved,
            got=f"{len(wrong)} adopted storages without the weights' values {wrong[:3]}; after a step {len(behind)} differ "
            f"from the weights {behind[:3]}; the step changed {'them' if moved else 'none of them'}",
            expected="the present values in the storage, and every later change",
            likely="adopt copies the storage instead of using it, or the optimizer goes on with the old one",
        )

    def test_a_saved_backend_goes_on_bit_for_bit(self, build, tmp_path):
        self._needs_training()
        ref = next(self.references())
        config = OptimizerConfig(lr=1e-2, warmup_steps=4, weight_decay=0.01)
        needs, rows = [TOKEN_OUTPUTS[ref.spec.kind][0]], Sequences.random(LENGTHS, seed=11)

        def train(backend: TrainingBackend, steps: int) -> TrainingBackend:
            for _ in range(steps):
                Passes(backend, rows, seed=11).backward(needs)
                backend.optim_step()
            return backend

        first = train(build(ref.spec, config), 2)
        (tmp_path / "saved").mkdir()
        first.save(tmp_path / "saved")
        train(first, 2)
        second = build(ref.spec, config)
        second.load(tmp_path / "saved")
        restored = second.version
        train(second, 2)
        there = whole_weights(second)
        differing = [n for n, p in first.full_parameters() if not torch.equal(p, there[n])]
        require(
            restored == 2 and not differing,
            got=f"version {restored} after load; after two more steps {len(differing)} parameters differ: "
            f"{differing[:3]}",
            expected="version 2, and the same bits as without the interruption",
            likely="the optimizer's moments or step count, the schedule's position or the version are not saved",
        )

    def test_loading_what_is_not_there_says_so(self, build, tmp_path):
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
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        for at, ref in enumerate(self.references()):
            backend, folder = build(ref.spec, None), tmp_path / str(at)
            backend.export_hf(folder)
            auto = (
                AutoModelForCausalLM
                if ref.spec.kind == "policy"
                else AutoModelForSequenceClassification
            )
            loaded = dict(auto.from_pretrained(Path(folder)).named_parameters())
            for name, expected in ref.parameters.items():
                require(
                    name in loaded,
                    got=f"an export of {self._name(ref)} that has no {name} (it has {', '.join(list(loaded)[:4])}, "
                    "...)",
                    expected="Hugging Face's names",
                    likely="wrapper prefixes are left in the names (module., _orig_mod., hf.)",
                )
                require_close(
                    loaded[name].float(),
                    expected,
                    self.weight_tolerance * float(expected.abs().max()),
                    what=f"exported {name}",
                    likely="weights are converted wrongly on their way out, or the export holds one rank's shard",
                )

    def test_weights_survive_offloading(self, build):
        ref = next(self.references())
        backend = build(ref.spec, memoryless() if self.trains else None)
        before = whole_weights(backend)
        backend.offload()
        backend.onload()
        differing = [
            n for n, p in backend.full_parameters() if not torch.equal(p.detach(), before[n])
        ]
        require(
            not differing,
            got=f"other weights after offload and onload: {differing[:3]}",
            expected="the same bits",
            likely="offload drops what onload does not bring back",
        )
