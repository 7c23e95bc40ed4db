"""Common code of the training backends that run Hugging Face models.

Checking a config imports `config`, `models` and `shapes` alone, which do not import transformers.
"""
