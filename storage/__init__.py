"""The run's directory in object storage, in shelves: stores, records, weights, journal, fleet.

A shelf imports only shelves to its left in the order stores, records, weights, journal, fleet. The files beside the
shelves (clock, errors, waiting, paths, threads, process identities, digests) serve all shelves; `testing.py` is the
contract of a store, for tests. This package must not know tasks, workflows, resources, Flyte or torch. docs/format.md
specifies the bytes that it writes.
"""
