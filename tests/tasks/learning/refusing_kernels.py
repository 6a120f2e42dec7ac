"""A kernel without a backward pass in place of the attention of packed models."""

from contextlib import contextmanager
from unittest.mock import patch

from tasks.learning import packing

REFUSAL = "no backward pass for heads of this size"


@contextmanager
def attention_without_backward():
    """Within this block the attention of packed models raises when its gradient is asked for."""
    attention = packing._attention

    def refuse(_gradient):
        raise RuntimeError(REFUSAL)

    def without_backward(*given, **named):
        found, weights = attention(*given, **named)
        if found.requires_grad:
            found.register_hook(refuse)
        return found, weights

    with patch.object(packing, "_attention", without_backward):
        yield
