"""From prompts to tokens: the Engine protocol, its implementations, keyed noise, and the session that drives a slot.

torch is imported by the engines and keyed_noise only, vllm by vllm_engine only.
"""
