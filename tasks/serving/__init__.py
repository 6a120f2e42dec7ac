"""`gleaner serve`: OpenAI's API in front of a run, whose every answer is a recorded response."""
