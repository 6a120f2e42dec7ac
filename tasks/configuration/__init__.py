"""RunConfig: the whole configuration of a run, one file for each section, and the references that tasks exchange.

Reading is strict: an unknown field is refused with its path. This is the lowest folder of tasks/: every other package
may read a section, and none is imported here.
"""
