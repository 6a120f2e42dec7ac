"""Rewards: from finished responses to numbers. Verifiers, users' functions, and the process that contains them.

Must not know Flyte. Only run_rewards knows storage, only reward_model torch.
"""
