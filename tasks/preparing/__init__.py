"""What the planning tasks do: check the input, open the run, draw prompts, write the plan."""
