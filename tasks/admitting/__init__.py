"""Admitting runs to a fleet, by reports or by a forecast, and the commands `gleaner fleet`.

The package stands above `sharing`, which knows no forecast, and `forecasting`, which simulates a run in a fleet.
"""
