"""Rewards: from finished responses to numbers. Verifiers, users' functions, and the process that contains them.

Must not know storage, torch or Flyte.
"""
