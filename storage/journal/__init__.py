"""The token journal: claims, shards, responses, and how long they are kept."""
