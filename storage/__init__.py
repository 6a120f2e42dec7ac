"""The run's directory in object storage, in shelves: stores, records, weights, the journal, and fleets.

A shelf imports the shelves named before it, never one named after it. The files beside the shelves (clock, waiting,
paths, threads, process identities, digests) serve all of them. This package must not know tasks, workflows, resources,
Flyte or torch. docs/format.md specifies the bytes that it writes.
"""
