"""Where prompts come from: files, Hugging Face datasets on disk, the built-in generator; their order and their tokens.

Must not know torch or Flyte; of storage only the prompt table.
"""
