"""Rewards of finished responses: verifiers, users' functions, and the process of a function.

Nothing here knows Flyte. Only run_rewards uses storage, and only reward_model imports torch.
"""
