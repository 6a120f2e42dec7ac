"""Evaluation: pass@k and mean@n of a weight version on held-out prompts, with the crew and the journal of training.

An evaluation is an iteration without training in a directory below the run's. Knows neither gradients nor Flyte.
"""
