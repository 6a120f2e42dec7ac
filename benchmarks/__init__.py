"""One script per claim. Each prints a table, and with --json one JSON object on its last line.

Two arms are always compared interleaved in one run; ratios and medians are reported, good or bad.
"""
