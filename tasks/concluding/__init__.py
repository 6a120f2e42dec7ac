"""The work of the concluding tasks: verify, commit, delete what is no longer needed, and inform people."""
