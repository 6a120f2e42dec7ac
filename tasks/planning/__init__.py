"""Decisions of an iteration as pure functions: who generates what, in which order. No IO, no clock, no torch.

The simulator calls exactly these functions.
"""
