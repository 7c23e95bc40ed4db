"""Hugging Face models as roles: what the training backends that run them share.

Checking a config imports `config`, `models` and `shapes` alone, which do not import transformers.
"""
