"""The compute that a run rents: pools of machines, their prices, and the notice before a machine is taken away.

This package must not know tasks or storage. Only pools.py and pod_template.py import flytekit.
"""
