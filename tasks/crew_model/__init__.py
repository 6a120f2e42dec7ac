"""The event model of one iteration's crew, and the rules of its members that production's sessions follow, too.

Planning asks the model about a few crews; the forecast simulates every iteration with it. No IO, clock or torch.
"""
