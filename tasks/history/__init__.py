"""The memory of the planner: reads the reports of earlier iterations, and keeps tables of learned lengths.

The package decides nothing: tasks/planning decides, without IO. The package must not know torch or Flyte.
"""
