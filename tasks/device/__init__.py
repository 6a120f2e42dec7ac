"""The GPUs that this process can compute on, and whether they are those of its pool."""
