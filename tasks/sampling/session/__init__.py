"""A member at work: it claims, decodes, flushes, looks for more work, hands over and leaves."""
