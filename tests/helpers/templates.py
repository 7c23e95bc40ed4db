"""Chat templates in the manner of model families, and a tokenizer that knows their special tokens.

Written for these tests, shorter than the families' own, with what makes each one hard: which end of a turn, what of earlier
turns is left out, where tools stand. The families: Qwen2.5 and Qwen3 (huggingface.co/Qwen), Llama 3.1
(huggingface.co/meta-llama), Mistral Small 3.1 (huggingface.co/mistralai), Gemma 2 (huggingface.co/google), Phi 4 mini
(huggingface.co/microsoft).
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from helpers.sources import bpe
from hybridflow.backends.tokenizers.huggingface import HFTokenizer

SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "llama": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    "mistral": ["[TOOL_CALLS]"]
    + [
        f"[{kind}{name}]"
        for name in ("INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS")
        for kind in ("", "/")
    ],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "phi": ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"],
}
CALLS = (
    "{% for c in m.tool_calls %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}"
)
TOOLS = "# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
# Results of tools that follow each other are one turn of the user.
RESULT = (
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN25 = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = 'You are helpful.' %}{% set rest = messages %}{% endif %}"
    "<|im_start|>system\n{{ s }}{% if tools %}" + TOOLS + "{% endif %}<|im_end|>\n"
    "{% for m in rest %}{% if m.role == 'tool' %}"
    + RESULT
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}" + CALLS + "{% endif %}<|im_end|>\n{% endif %}{% endfor %}" + OPENING
)
# The last turn has a block of thinking, which goes once the user has said something else.
QWEN3 = QWEN25.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}",
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
# A turn with a call has no content, and only one call; the date stands before everything.
LLAMA31 = (
    "{{ bos_token }}{% macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}"
    "{{ head('system') }}Today: 26 Jul 2024\n{% if tools %}" + TOOLS + "{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{{ head('assistant') }}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot_id|>'
    "{% elif m.role == 'tool' %}{{ head('ipython') }}{{ m.content | tojson }}<|eot_id|>"
    "{% else %}{{ head(m.role) }}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)
# Tools stand before the last message of the user; nothing opens the model's turn; ids have nine characters.
MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length < 9 %}{{ raise_exception('id') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}[TOOL_RESULTS] {{ m.content }}, {{ m.tool_call_id[-9:] }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
# Neither system messages nor tools.
GEMMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Without an opening it ends the text.
PHI4 = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
FAMILIES = {
    "qwen2.5": ("qwen", QWEN25, "<|im_end|>"),
    "qwen3": ("qwen", QWEN3, "<|im_end|>"),
    "llama3.1": ("llama", LLAMA31, "<|eot_id|>"),
    "mistral": ("mistral", MISTRAL, "<eos>"),
    "gemma2": ("gemma", GEMMA2, "<end_of_turn>"),
    "phi4": ("phi", PHI4, "<|end|>"),
}
"""Family -> (its special tokens, its template, the token that ends a turn)."""
WITH_TOOLS = ("qwen2.5", "qwen3", "llama3.1", "mistral")


def with_template(template: str) -> PreTrainedTokenizerFast:
    """As transformers has it, and a stranger's folder."""
    hf = PreTrainedTokenizerFast(
        tokenizer_object=bpe().fast,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token=None,
    )
    hf.chat_template = template
    return hf


def chat_tokenizer(template: str, special: str = "qwen") -> HFTokenizer:
    """A tokenizer with this template."""
    hf = with_template(template)
    hf.add_special_tokens({"additional_special_tokens": SPECIAL[special]})
    return HFTokenizer(hf, "a test")


def family(name: str) -> HFTokenizer:
    special, template, _ = FAMILIES[name]
    return chat_tokenizer(template, special)
