"""What the planner learns from a run: reads what earlier iterations showed, and writes it.

This package decides nothing: tasks/planning does, without IO. It must not know torch or Flyte.
"""
