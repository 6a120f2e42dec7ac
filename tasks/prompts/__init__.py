"""Prompts: their sources (files, Hugging Face datasets on disk, the built-in generator), their order and their tokens.

Nothing here knows torch or Flyte; of storage, only the prompt table is used.
"""
