"""Evaluation: pass@k and mean@n of a weight version on held-out prompts, by the crew and the journal of training.

Knows neither gradients nor Flyte; what is written is an iteration without training in a directory below the run's.
"""
