"""Several runs on one trainer: which host trains which run, in which order, and who pays for a host's seconds.

Placement, order, residents and billing are pure; host.py acts. Nothing here knows torch or Flyte: what really trains is
behind the interface of workers.py.
"""
