"""Flyte tasks and their logic. A file directly in this folder is a Flyte task; a folder never imports flytekit.

A task builds its adapters, calls one plain function and returns references and small values, never tokens.
"""
