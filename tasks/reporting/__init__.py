"""What an iteration tells its user: the metrics of its report and the pages of its Deck (inline SVG, no scripts).

Pure functions of records; must not know torch or Flyte.
"""
