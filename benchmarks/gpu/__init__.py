"""`python -m benchmarks.gpu`: what only a GPU can tell."""
