"""Reports for the user: the metrics of an iteration, and the pages of its Deck (inline SVG, no scripts).

Pure functions of records; must not know torch or Flyte.
"""
