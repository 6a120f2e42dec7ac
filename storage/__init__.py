"""The run's directory in object storage: stores, keys, records, shards, the journal, claims, weights.

Must not know tasks, workflows, resources, Flyte or torch. The bytes written here are specified in docs/format.md.
"""
