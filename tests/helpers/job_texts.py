"""The smallest configs that become jobs, and an algorithm that is named by its path."""

from __future__ import annotations

import textwrap

from helpers.tiny import MODEL

BASE = f"""
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4 }}
runtime = "inline"
tokenizer.characters = "0123456789+="
data = {{ source = "arithmetic", bos = true, answer = "{{answer}}", max_prompt_tokens = 8 }}
sampling.max_tokens = 4
reward.function = "exact_match"
actor.model.config = {MODEL}
"""
STAGES = f"""
runtime = "inline"
tokenizer.train = "char"
data = {{ source = "arithmetic", max_prompt_tokens = 8 }}
sampling.max_tokens = 4
reward.function = "exact_match"
[stages.first]
actor.model.config = {MODEL}
algorithm = {{ name = "sft", batch_size = 4 }}
data.response = "{{answer}}"
[stages.second]
actor.model.path = "stage:first"
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4 }}
"""
LINES = BASE.splitlines()
WITHOUT_ALGORITHM = "\n".join(line for line in LINES if not line.startswith("algorithm"))
WITHOUT_REWARD = "\n".join(line for line in LINES if not line.startswith("reward"))

ALGORITHM = textwrap.dedent("""
    import attrs
    from hybridflow.core.contracts.algorithm import Algorithm
    from hybridflow.core.contracts.role import Role
    class Mine(Algorithm):
        {body}
        def roles(self):
            return ({roles},)
        def step(self, ctx):
            pass
""").replace("class Mine", "@attrs.frozen\nclass Config:\n    size: int = 4\n\nclass Mine")
"""An algorithm of a stranger: the source of a module with the class `Mine`."""
