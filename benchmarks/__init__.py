"""One script per claim. Each script prints a table, and with --json one JSON object on its last line.

Arms are always interleaved in one run; ratios and medians are reported, good or bad.
"""
