"""What vLLM's loader says of each architecture of the zoo with tp 2, from its config alone: `python -m helpers.zoo_traced`.

It prints a JSON line each, and changes its process as vLLM does.
"""

from __future__ import annotations

import json
import os

from helpers.zoo import ENGINES, ZOO
from hybridflow.backends.vllm import planned


def main() -> None:
    os.environ.update(planned.VARIABLES)
    from vllm.model_executor.models import registry

    # It would look at each class in a process of its own, to keep CUDA out of this one, and keep what it has found.
    registry._run_in_subprocess = lambda look: look()
    arguments = {"max_model_len": ENGINES["vllm"]["max_length"]}
    for name, animal in ZOO.items():
        try:
            found = planned.traced_ranks(animal.config(), 2, "bfloat16", arguments)
            said = {"shapes": found.shapes, "opaque": dict(found.opaque)}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print("traced " + json.dumps({"name": name, **said}), flush=True)


if __name__ == "__main__":
    main()
