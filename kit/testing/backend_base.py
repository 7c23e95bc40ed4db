"""What the tests of training backends share, and what an author says of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from hybridflow.core.contracts.training import TrainingBackend
from hybridflow.kit.testing.checks import missing_fixture, require, require_close
from hybridflow.kit.testing.models import Reference, reference

LENGTHS = ((3, 5), (1, 1), (6, 2), (2, 7), (4, 0))
"""(prompt, response) tokens of the rows that outputs are compared on."""
TOKEN_OUTPUTS = {"policy": ("logprobs", "entropy"), "value": ("values",), "score": ("scores",)}


class BackendBase:
    """Flags, the fixture `build`, and helpers."""

    architectures: Sequence[str] = ("qwen2", "llama")
    kinds: Sequence[str] = ("policy", "value", "score")
    """Kinds of model that it builds."""
    trains = True
    """Whether it takes an optimizer; False for a backend that only scores."""
    topk = True
    """Whether it gives topk_logprobs and topk:K."""
    tolerance = 2e-4
    """Of outputs, absolute, in nats or values."""
    gradient_tolerance = 2e-3
    """Of gradients, relative to the largest entry of their parameter."""
    weight_tolerance = 0.0
    """Of weights after loading: 0 where they are kept in float32."""

    @pytest.fixture
    def build(self) -> Callable[..., TrainingBackend]:
        return missing_fixture(
            self, "build", "a function (ModelSpec, OptimizerConfig or None) -> a built backend"
        )

    def references(self, *kinds: str) -> Iterator[Reference]:
        for architecture in self.architectures:
            for kind in kinds or self.kinds:
                if kind in self.kinds:
                    yield reference(architecture, kind)

    def _needs_training(self) -> None:
        if not self.trains:
            pytest.skip("it does not train")

    def _name(self, ref: Reference) -> str:
        return f"{ref.spec.hf_config['model_type']} {ref.spec.kind}"

    def _names(self, found, ref: Reference, where: str) -> None:
        missing, extra = (
            sorted(set(ref.parameters) - set(found)),
            sorted(set(found) - set(ref.parameters)),
        )
        require(
            not missing and not extra,
            got=f"{where} of {self._name(ref)} lacks {missing[:3]} and has {extra[:3]} beside",
            expected="the names of the safetensors that Hugging Face saves; tied parameters once, the other name in "
            "layout().ties",
            likely="wrapper prefixes, fused parameters, or a tied head listed as a parameter of its own",
        )

    def _same(self, found: dict, expected: dict, what: str, likely: str) -> None:
        largest = max(float(e.abs().max()) for e in expected.values())
        for name, value in expected.items():
            require(
                name in found,
                got=f"no {name} in {what} (there are {', '.join(list(found)[:4])}, ...)",
                expected=name,
                likely="a parameter is missing from full_parameters",
            )
            room = self.gradient_tolerance * max(float(value.abs().max()), 1e-3 * largest)
            require_close(found[name].float(), value, room, what=f"{name}: {what}", likely=likely)
