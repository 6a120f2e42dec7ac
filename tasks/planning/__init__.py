"""The decisions of an iteration as pure functions: which members generate what, in which order. No IO, clock or torch.

The simulator calls exactly these functions.
"""
