"""Forecasting: simulates a run in virtual time, with the planner and the rebalancing that production uses.

This package holds scenarios, discrete events, machines that come and go, and the ledger of seconds and dollars. It
holds no policies.
"""
