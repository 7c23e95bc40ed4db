"""Training with every parameter's rows dealt out to the data-parallel ranks in stripes."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.core import Metrics, Param, TrainingBackend, WeightLayout
from hybridflow.core.errors import CheckpointError
from strangers.settings import StripedConfig, striped_boxes

TINTED = 5
"""The token whose logit a row's `tint` is added to."""


class Striped(TrainingBackend):
    Config = StripedConfig

    def build(self):
        spec = self.model_spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.init_seed)
            if spec.path is not None:
                self.hf = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
            else:
                self.hf = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(**spec.hf_config), dtype=torch.float32
                )
        self.hf.eval()
        self.named = dict(self.hf.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.named.items()}
        self.boxes = {
            name: self._boxes(shape, self.context.rank) for name, shape in self.shapes.items()
        }
        with torch.no_grad():
            self.stripes = {
                n: [p[b.slices()].clone() for b in self.boxes[n]] for n, p in self.named.items()
            }
        self.gradients = {
            name: [torch.zeros_like(s) for s in stripes] for name, stripes in self.stripes.items()
        }
        for p in self.named.values():
            p.data = torch.empty(0)
        self.adamw = None
        if (c := self.optimizer_config) is not None:
            own = [s for stripes in self.stripes.values() for s in stripes]
            if own:
                self.adamw = torch.optim.AdamW(
                    own, lr=c.lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay
                )

    def _boxes(self, shape, rank):
        return striped_boxes(shape, self.config.height, rank, self.context.layout.dp)

    def _whole(self, name):
        """The whole parameter, on every rank."""
        full = torch.zeros(self.shapes[name])
        for box, stripe in zip(self.boxes[name], self.stripes[name], strict=True):
            full[box.slices()] = stripe
        if (group := self.context.group("dp")) is not None:
            dist.all_reduce(full, group=group)
        return full

    @contextmanager
    def _gathered(self):
        for name, p in self.named.items():
            p.data = self._whole(name)
        try:
            yield
        finally:
            for p in self.named.values():
                p.data, p.grad = torch.empty(0), None

    # Compute
    def _outputs(self, micro, needs, temperature):
        rows, t = micro.places
        at = micro.prompt_lengths[rows] + t
        logits = self.hf(input_ids=micro.ids, use_cache=False).logits.float()[rows, at - 1]
        if "tint" in micro.extras:
            tint = torch.as_tensor(micro.extras["tint"].values)[rows]
            logits = logits + tint[:, None] * torch.nn.functional.one_hot(
                torch.tensor(TINTED), logits.shape[-1]
            )
        log_p = (logits / temperature).log_softmax(-1)
        made = {}
        for need in needs:
            flat = (
                log_p.gather(-1, micro.ids[rows, at][:, None])[:, 0]
                if need == "logprobs"
                else -(log_p.exp() * log_p).sum(-1)
            )
            made[need] = flat.new_zeros(len(micro.ids), micro.width).index_put((rows, t), flat)
        return made

    @torch.no_grad()
    def forward(self, micros, needs, temperature=1.0):
        with self._gathered():
            return [self._outputs(micro, needs, temperature) for micro in micros]

    def forward_backward(self, micros, needs, loss, temperature=1.0):
        with self._gathered():
            for number, micro in enumerate(micros):
                loss(number, self._outputs(micro, needs, temperature)).backward()
            for name, p in self.named.items():
                whole = torch.zeros(self.shapes[name]) if p.grad is None else p.grad
                if (group := self.context.group("dp")) is not None:
                    dist.all_reduce(whole, group=group)
                for box, gradient in zip(self.boxes[name], self.gradients[name], strict=True):
                    gradient += whole[box.slices()]

    def optim_step(self):
        c = self.optimizer_config
        lr = c.lr_at(self.version)
        [squares] = self.context.sum(
            [sum(float(g.square().sum()) for gs in self.gradients.values() for g in gs)]
        )
        norm = squares**0.5
        scale = min(1.0, c.max_grad_norm / (norm + 1e-6)) if c.max_grad_norm else 1.0
        if norm < float("inf"):
            if self.adamw is not None:
                for group in self.adamw.param_groups:
                    group["lr"] = lr
                for name, stripes in self.stripes.items():
                    for stripe, gradient in zip(stripes, self.gradients[name], strict=True):
                        stripe.grad = gradient * scale
                self.adamw.step()
            self.version += 1
        for gradients in self.gradients.values():
            for gradient in gradients:
                gradient.zero_()
        return Metrics.of(grad_norm=norm, lr=lr)

    # Weights
    def layout(self):
        params = {name: Param(shape, torch.float32) for name, shape in self.shapes.items()}
        kept = {id(p): name for name, p in self.named.items()}
        every = self.hf.named_parameters(remove_duplicate=False)
        ties = {name: kept[id(p)] for name, p in every if name not in self.named}
        ranks = range(self.context.layout.dp)
        return WeightLayout(
            params, {r: {n: self._boxes(s, r) for n, s in self.shapes.items()} for r in ranks}, ties
        )

    def named_shards(self):
        for name, stripes in self.stripes.items():
            for box, stripe in zip(self.boxes[name], stripes, strict=True):
                yield name, box, stripe

    def full_parameters(self):
        for name in self.named:
            yield name, self._whole(name)

    # Files: for as many ranks as wrote them
    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        adamw = self.adamw.state_dict() if self.adamw is not None else None
        torch.save(
            {"stripes": self.stripes, "adamw": adamw, "version": self.version},
            folder / f"{self.context.rank}.pt",
        )

    def load(self, folder):
        try:
            state = torch.load(folder / f"{self.context.rank}.pt")
        except OSError as error:
            raise CheckpointError(
                f"role {self.context.role!r}: {folder} cannot be read: {error}"
            ) from error
        with torch.no_grad():
            for name, stripes in self.stripes.items():
                for stripe, saved in zip(stripes, state["stripes"][name], strict=True):
                    stripe.copy_(saved)
        self.version = state["version"]
        if self.adamw is not None:
            self.adamw.load_state_dict(state["adamw"])

    def export_hf(self, folder, dtype=None):
        with self._gathered():
            if self.context.rank == 0:
                self.hf.save_pretrained(folder)
