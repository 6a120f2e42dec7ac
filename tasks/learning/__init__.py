"""From graded groups to the next weight version: advantages, loss, micro-batches, optimizer step, checkpoint.

Formulas are pure functions of tensors. Nothing here knows Flyte.
"""
