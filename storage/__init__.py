"""The run's directory in object storage: stores, keys, records, shards, the journal, claims, weights.

This package must not know tasks, workflows, resources, Flyte or torch. docs/format.md specifies the bytes it writes.
"""
