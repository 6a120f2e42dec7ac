"""The work of the planning tasks: check the input, open the run, draw prompts, write the plan."""
