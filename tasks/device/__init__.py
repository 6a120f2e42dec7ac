"""The GPUs of this process, and their comparison with the pool's configuration."""
