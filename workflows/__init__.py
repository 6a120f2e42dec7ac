"""Flyte workflows: they wire tasks and pools, without arithmetic or IO.

Module and function names here are public: launch plans, caches and history refer to them.
"""
