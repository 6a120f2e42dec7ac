"""What a model of transformers is to engines and trainer alike: its configuration, and the names of its tensors."""
