"""Rollout: the Engine protocol, its implementations, keyed noise, and the session that generates a slot's responses.

Only the engines and keyed noise import torch, only vllm_names imports vLLM, and only *_triton import Triton.
"""
