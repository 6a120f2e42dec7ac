"""From prompts to tokens: the Engine protocol, its implementations, keyed noise, and the session that drives a slot.

torch is imported by the engines and keyed noise only, vLLM by vllm_names only, Triton by keyed_noise_triton only.
"""
