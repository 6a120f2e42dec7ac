"""Configurations of other libraries, written as ours: what is read from them, what it means here, what is left out.

Scripts are parsed and never executed. The names are in `tasks.configuration.other_names`, the meanings here.
"""
