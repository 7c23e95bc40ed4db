"""Hugging Face's models as roles: what training backends that run them share. Nothing here is imported to check a config."""
