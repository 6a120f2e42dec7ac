"""What is read from and written to a run for its planner: what earlier iterations showed.

Decides nothing: the decisions are tasks/planning's, which does no IO. Must not know torch or Flyte.
"""
