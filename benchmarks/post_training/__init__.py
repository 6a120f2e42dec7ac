"""What the kinds of post-training beside reinforcement learning reach on toys: a part each."""
