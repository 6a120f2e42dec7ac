"""What decodes: one protocol, and engines in PyTorch, vLLM and, for tests and simulations, scripted."""
