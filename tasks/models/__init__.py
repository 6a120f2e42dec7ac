"""The model of transformers as engines and trainer share it: the configuration, and the names of tensors."""
