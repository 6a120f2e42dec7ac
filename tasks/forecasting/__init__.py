"""Forecasting: a run lived through in virtual time, with the planner and the rebalancing that production uses.

Here: scenarios, discrete events, machines that come and go, the ledger of seconds and dollars. Not here: policies.
"""
