"""Whether a model's logits are the product of its head with the last hidden state, as the trainer computes them.

Models that scale or cap logits (Granite, Cohere, Gemma 2) do more in `forward`. The check runs the model's own
`forward` with a body and a head that return known numbers: no weight is read, and the model may be on the meta device
or divided among ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learning.trained_model import PolicyError

_POSITIONS, _COLUMNS = 4, 64
# Logits of this size: a cap far above usual logits, such as 30 or 50, then changes them by much.
_SIZE = 100.0


def check_head(model: Any) -> None:
    """Raise PolicyError unless a causal language model's logits are `head(last hidden state)`, by a linear head."""
    kind = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise PolicyError(f"model: {kind} has no linear head; allowed: causal language models")
    if model.base_model is model:
        raise PolicyError(f"model: {kind} has no body apart from its head; allowed: causal language models that have")
    try:
        expected, actual = _logits(model, head)
    except Exception as error:  # noqa: BLE001 - the code is the model's, and may do anything with its body's output
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise PolicyError(
            f"model: {kind} computes its logits by more than its body and a linear head ({reason}); "
            "allowed: models with a linear head"
        ) from None
    if actual.shape != expected.shape or not torch.allclose(expected, actual, rtol=1e-4, atol=1e-4):
        raise PolicyError(
            f"model: {kind} transforms its logits{_named(model.config)}; allowed: models with a linear head"
        )


def _logits(model: Any, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """The logits [1, positions, columns] of known hidden states: by the known head alone, and by the model."""
    width, columns = head.weight.shape[1], min(_COLUMNS, head.weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _POSITIONS, width, generator=generator)
    known = torch.randn(columns, width, generator=generator) * (_SIZE / width**0.5)
    ids = torch.zeros(1, _POSITIONS, dtype=torch.int64)
    calls: list[bool] = []

    def body(*given: Any, **named: Any) -> "_BodyOutput":
        own = given[0] if given else named.get("input_ids")
        calls.append(own is ids and named.get("inputs_embeds") is None)
        return _BodyOutput(hidden)

    # The body is what `base_model` names, or in some families (OPT) the decoder in it.
    bodies = {id(each): each for each in (model.base_model, model.get_decoder()) if each is not model}
    with torch.no_grad(), ExitStack() as stack:
        for each in bodies.values():
            stack.enter_context(_computing(each, body))
        stack.enter_context(_computing(head, lambda states: states @ known.T))
        actual: Tensor = model(input_ids=ids, use_cache=False).logits
    if calls != [True]:
        raise ValueError("its body does not get the tokens alone, once")
    return hidden @ known.T, actual


def _named(config: Any) -> str:
    """The fields of a configuration whose names contain "logit", with values, for the error's message, or ""."""
    fields = {
        name: value for name, value in config.to_dict().items() if "logit" in name and not name.startswith("attn")
    }
    given = [
        f"{name} {value}" for name, value in fields.items() if isinstance(value, float | int) and value is not True
    ]
    return f" ({', '.join(given)})" if given else ""


@contextmanager
def _computing(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute `forward` within the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class _BodyOutput:
    """The output of a body: `last_hidden_state`, and None for every further attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
