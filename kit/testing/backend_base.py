"""The part that all tests of training backends share: an author's flags, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hybridflow.core.contracts.training import OptimizerConfig, TrainingBackend
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.testing.checks import missing_fixture, require, require_close
from hybridflow.kit.testing.models import Reference, reference
from hybridflow.kit.testing.passes import one_rank

LENGTHS = (
    (3, 5),
    (1, 1),
    (6, 2),
    (2, 7),
    (4, 0),
)
"""(prompt, response) tokens of the rows that outputs are compared on; one response is empty."""
TOKEN_OUTPUTS = {
    "policy": ("logprobs", "entropy"),
    "value": ("values",),
    "score": ("scores",),
}
"""Outputs that are compared, by the kind of model."""


def first_output(ref: Reference) -> list[str]:
    """Return the output that a test needs where one is enough to show a fault."""
    return [TOKEN_OUTPUTS[ref.spec.kind][0]]


class BackendBase:
    """Flags of the backend under test, the fixture `build`, and helpers."""

    backend: type[TrainingBackend] | None = None
    """The backend's class; the tests over ranks, each a process, must be able to import it."""
    config: Any = None
    """Its settings; None: the defaults of its attribute Config, or none at all."""
    device: str = "cpu"
    """The device of the tests on one rank; those over ranks are on the CPU."""
    architectures: Sequence[str] = ("qwen2", "llama")
    """Model types, of Hugging Face's configs, that the tests build."""
    kinds: Sequence[str] = ("policy", "value", "score")
    """Kinds of model that the backend builds."""
    trains = True
    """Whether the backend takes an optimizer; False for a backend that only scores."""
    topk = True
    """Whether the backend has the outputs topk_logprobs and topk:K."""
    tolerance = 2e-4
    """Absolute tolerance of outputs: in nats, or in the units of values and scores."""
    gradient_tolerance = 2e-3
    """Tolerance of gradients, relative to the largest entry of their parameter."""
    weight_tolerance = 0.0
    """Tolerance of loaded weights, relative to the largest entry of their parameter.

    It is 0 where weights are stored in float32.
    """

    @pytest.fixture
    def build(self) -> Iterator[Callable[..., TrainingBackend]]:
        """The function (ModelSpec, OptimizerConfig or None) that builds a backend on one rank.

        Give a fixture of this name where a backend is built otherwise; tests over ranks are left
        out then.
        """
        what = "your backend's class, and `config`, its settings"
        make = self.backend or missing_fixture(self, "backend", what)

        def built(spec: ModelSpec, optimizer: OptimizerConfig | None) -> TrainingBackend:
            made: TrainingBackend = make(spec, self._settings(), optimizer, context)
            made.build()
            return made

        with one_rank(self.device) as context:
            yield built

    def _settings(self) -> Any:
        """Return `config`, or the defaults of the backend's Config."""
        if self.config is None and self.backend is not None and self.backend.Config is not None:
            return self.backend.Config()
        return self.config

    def references(self, *kinds: str) -> Iterator[Reference]:
        """Yield the reference models of these kinds (default: all) that the flags allow."""
        for architecture in self.architectures:
            for kind in kinds or self.kinds:
                if kind in self.kinds:
                    yield reference(architecture, kind)

    def _needs_training(self) -> None:
        """Skip the test where the backend takes no optimizer."""
        if not self.trains:
            pytest.skip("it does not train")

    def _name(self, ref: Reference) -> str:
        """Return a model's name in messages, such as "qwen2 policy"."""
        return f"{ref.spec.hf_config['model_type']} {ref.spec.kind}"

    def _names(self, found, ref: Reference, where: str) -> None:
        """Require that `found` has the model's canonical names and no others."""
        missing = sorted(set(ref.parameters) - set(found))
        extra = sorted(set(found) - set(ref.parameters))
        require(
            not missing and not extra,
            got=f"{where} of {self._name(ref)} lacks {missing[:3]} and has {extra[:3]} beside",
            expected="the names of the safetensors that Hugging Face saves; tied parameters once, "
            "the other name in layout().ties",
            likely="wrapper prefixes, fused parameters, or a tied head listed as a parameter of "
            "its own",
        )

    def _same(self, found: dict, expected: dict, what: str, likely: str) -> None:
        """Require that tensors are equal, by name, within `gradient_tolerance`.

        A parameter whose expected entries are all tiny would ask for more than rounding allows: its
        scale is at least a thousandth of the largest entry of all parameters.
        """
        largest = max(float(values.abs().max()) for values in expected.values())

        for name, values in expected.items():
            require(
                name in found,
                got=f"no {name} in {what} (there are {', '.join(list(found)[:4])}, ...)",
                expected=name,
                likely="a parameter is missing from full_parameters",
            )

            scale = max(float(values.abs().max()), 1e-3 * largest)
            require_close(
                found[name].float(),
                values,
                self.gradient_tolerance * scale,
                what=f"{name}: {what}",
                likely=likely,
            )
