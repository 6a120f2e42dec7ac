"""Fleets: the records of runs that share trainers, their hosts and seats."""
