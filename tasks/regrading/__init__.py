"""Grades the stored responses of a run again, with other rewards, beside the run's own.

A grading reads a run and adds files of its own; no part of training reads a grading.
"""
