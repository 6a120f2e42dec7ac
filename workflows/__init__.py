"""Flyte workflows: wiring of tasks and pools only, no arithmetic and no IO.

Module and function names here are public: launch plans, caches and history refer to them.
"""
