"""The event model of an iteration's crew, and the rules of rebalancing that production's sessions follow, too.

Planning asks the model about a few crews; the forecast simulates every iteration with the model. No IO, clock or torch.
"""
