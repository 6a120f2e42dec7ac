"""Weights in object storage: sets of tensors, versions as differences, and the cache of one machine."""
