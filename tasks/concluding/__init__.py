"""What the concluding tasks do: verify, commit, delete what is no longer needed, and tell people."""
