"""A file directly in this folder is a Flyte task; a folder is plain Python that never imports flytekit.

A task builds its adapters, calls one plain function and returns references and small values, never tokens.
"""
