"""Scoring: a model's log-probs or values for the tokens of a batch, as modules that compute everything in `forward`.

Only `forward` reads parameters, so that they may be sharded over ranks.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learning.batching import TokenBatch
from tasks.learning.cpu_products import use_cpu_products
from tasks.learning.packing import is_packed
from tasks.learning.token_logprobs import token_logprobs
from tasks.learning.token_objective import TokenLoss, token_objective


class Scorer(nn.Module):
    """Log-probs of the tokens in the response mask under a causal language model with a linear head.

    Args:
        model: A Hugging Face causal language model; on a CPU its linear layers become `CpuLinear`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        use_cpu_products(model)

    def forward(
        self, batch: TokenBatch, temperature: float, loss: TokenLoss | None = None, together: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies as in `tasks.learning.policy.Policy.logprobs`; the batch is on the model's device.

        If `loss` is given, which takes tokens in the order of the response mask, its sum comes third, and
        log-probs have no gradient. `tasks.learning.token_objective` then saves a product with the head.
        """
        picked = completion_hidden(self.model.base_model, batch)
        head = self.model.get_output_embeddings()
        targets = batch.completion_ids.flatten()[batch.trained]
        given, temperature = (picked, head.weight, head.bias, targets), temperature or 1.0
        if loss is None:
            flat = token_logprobs(*given, temperature=temperature)
            return tuple(per_token(each, batch) for each in flat)
        objective, *flat_without_gradient = token_objective(*given, loss, together=together, temperature=temperature)
        return *(per_token(each, batch) for each in flat_without_gradient), objective


class Valuer(nn.Module):
    """Values of the tokens in the response mask: a Hugging Face model without a head, and one linear output in float32.

    Args:
        model: The body, whose linear layers become `CpuLinear` on a CPU.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        weight = model.get_input_embeddings().weight
        self.value_head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        use_cpu_products(model)

    def forward(self, batch: TokenBatch) -> Tensor:
        """The values [B, T] in the head's dtype, 0 off the mask; the batch is on the model's device."""
        picked = completion_hidden(self.model, batch)
        values = self.value_head(picked.to(self.value_head.weight.dtype))[:, 0]
        return per_token(values, batch)

    def gradient_checkpointing_enable(self, **settings: Any) -> None:
        """Enable gradient checkpointing in the model."""
        self.model.gradient_checkpointing_enable(**settings)


def completion_hidden(base_model: Any, batch: TokenBatch) -> Tensor:
    """The last hidden state before each token in the response mask, [tokens, H], in the order of the mask."""
    width = batch.response_mask.shape[1]
    rows, columns = batch.trained // width, batch.trained % width
    if is_packed(base_model):
        hidden, starts = _packed_hidden(base_model, batch)
    else:
        # Padding is on the right and the model is causal, so no token that is read sees it: no mask is needed.
        hidden = base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        starts = torch.arange(len(batch.responses), device=rows.device) * batch.input_ids.shape[1]
    # The token at prompt_length + t is predicted by the position before it.
    picked: Tensor = hidden.index_select(0, starts[rows] + batch.prompt_lengths[rows] + columns - 1)
    return picked


def _packed_hidden(base_model: Any, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The last hidden states [N, H] of a row of all responses, and where each response begins in it, [B] int32."""
    device, width, longest = batch.input_ids.device, batch.input_ids.shape[1], max(batch.total_lengths)
    bounds = torch.tensor([0, *accumulate(batch.total_lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in batch.total_lengths])
    places = torch.cat([torch.arange(length) + row * width for row, length in enumerate(batch.total_lengths)])
    bounds, positions, places = (each.to(device, non_blocking=True) for each in (bounds, positions, places))
    hidden: Tensor = base_model(
        input_ids=batch.input_ids.flatten()[places][None],
        position_ids=positions[None],
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state
    return hidden[0], bounds[:-1]


def per_token(values: Tensor, batch: TokenBatch) -> Tensor:
    """Put values [tokens], in the order of the response mask, into [B, T], 0 off the mask."""
    shape = batch.response_mask.shape
    return values.new_zeros(shape.numel()).scatter(0, batch.trained, values).view(shape)
