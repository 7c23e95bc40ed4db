"""Generation where each tensor-parallel rank stores one half of every parameter's rows."""

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.core import Completion, HybridFlowError, Param, WeightLayout
from hybridflow.kit.arrivals import Arrivals
from hybridflow.kit.batches import BatchEngine
from strangers.settings import HalvesConfig, half_box
from strangers.striped import TINTED


class Halves(BatchEngine):
    Config = HalvesConfig

    def start(self):
        self.hf = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**self.model.hf_config), dtype=torch.float32
        ).eval()
        self.shapes = {name: tuple(p.shape) for name, p in self.hf.named_parameters()}
        g = self.context.generation
        self.place = (
            {rank: at for replica in g.replicas for at, rank in enumerate(replica[0])}
            if g
            else {0: 0}
        )
        self.tp = g.tp if g else 1
        self.own = {
            name: half_box(shape, self.place[self.context.rank], self.tp)
            for name, shape in self.shapes.items()
        }
        self.held = {name: torch.zeros(box.shape) for name, box in self.own.items()}

    # Weights
    def layout(self):
        params = {name: Param(shape, torch.float32) for name, shape in self.shapes.items()}
        boxes = {
            rank: {n: (half_box(s, at, self.tp),) for n, s in self.shapes.items()}
            for rank, at in self.place.items()
        }
        return WeightLayout(params, boxes)

    def view(self, name, box):
        inside = [
            slice(a - o, b - o)
            for a, b, o in zip(box.start, box.stop, self.own[name].start, strict=True)
        ]
        return self.held[name][tuple(inside)]

    def receive(self, name, box, tensor):
        self.arrivals.note(name, box)
        self.view(name, box).copy_(tensor)

    def begin_update(self, version):
        super().begin_update(version)
        self.arrivals = Arrivals({name: (box,) for name, box in self.own.items()})

    def end_update(self):
        self.arrivals.check()
        super().end_update()

    # Tokens: each rank decodes the same requests with weights that it puts together from all halves
    def _put_together(self):
        group = self.context.group("generation.tp") if self.tp > 1 else None
        for name, p in self.hf.named_parameters():
            full = torch.zeros(self.shapes[name])
            full[self.own[name].slices()] = self.held[name]
            if group is not None:
                dist.all_reduce(full, group=group)
            p.data = full

    def submit(self, requests):
        self.check_ready()
        for r in requests:
            s = r.sampling
            if s.top_k or s.top_p < 1 or s.min_p or s.logit_bias or r.prefix_ids is not None:
                raise HybridFlowError(
                    f"request {r.id}: engine halves has no filters, no biases and no prefixes"
                )
        self._put_together()
        return (self._complete(r) for r in requests)

    @torch.no_grad()
    def _complete(self, request):
        s, made, logprobs, reason = request.sampling, [], [], "length"
        while len(made) < s.max_tokens and reason == "length":
            ids = torch.tensor([[*request.prompt_ids, *made]])
            logits = self.hf(input_ids=ids, use_cache=False).logits[0, -1].float()
            logits[TINTED] += float(request.extras.get("tint", 0.0))
            log_p = (logits / (s.temperature or 1.0)).log_softmax(-1)
            uniform = np.random.default_rng([request.seed, len(made)]).random()
            drawn = int(np.searchsorted(log_p.double().exp().cumsum(0).numpy(), uniform, "right"))
            made.append(int(log_p.argmax()) if s.greedy else min(drawn, len(log_p) - 1))
            logprobs.append(float(log_p[made[-1]]))
            if made[-1] in s.stop_token_ids and not s.ignore_stop:
                reason = "stop"
        return Completion(
            request.id,
            response_ids=np.array(made, np.int64),
            logprobs=np.array(logprobs, np.float32),
            weight_version=np.full(len(made), self.version, np.int64),
            finish_reason=reason,
        )
