"""Several runs on one trainer: the host of each run, the order of the phases, and the bill for a host's seconds.

Placement, order, residents and billing are pure; host.py acts. Hosts know neither torch nor Flyte: training is behind
the interface of workers.py.
"""
