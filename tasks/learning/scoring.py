"""Scoring: a model's log-probs or values for the tokens of a batch, as modules that compute everything in `forward`.

Parameters are read in `forward` only, and so may be sharded over ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learning.batching import TokenBatch
from tasks.learning.cpu_products import use_cpu_products
from tasks.learning.packed_row import packed_row
from tasks.learning.packing import is_packed
from tasks.learning.token_logprobs import token_logprobs
from tasks.learning.token_objective import HeadTerm, TokenLoss, token_objective


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
        self,
        batch: TokenBatch,
        temperature: float,
        loss: TokenLoss | None = None,
        together: Sequence[int] = (),
        label_smoothing: float = 0.0,
        term: HeadTerm | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies as in `tasks.learning.policy.Policy.logprobs`; the batch is on the model's device.

        With `loss` and `term`, of tokens in the order of the response mask, the sum of losses comes third, and
        log-probs have no gradient. `tasks.learning.token_objective` then saves a product with the head.
        """
        picked = completion_hidden(self.model.base_model, batch)
        head = self.model.get_output_embeddings()
        targets = batch.completion_ids.flatten()[batch.trained]
        given, temperature = (picked, head.weight, head.bias, targets), temperature or 1.0
        if loss is None:
            flat = token_logprobs(*given, temperature=temperature)
            return tuple(per_token(each, batch) for each in flat)
        objective, *flat_without_gradient = token_objective(
            *given, loss, together=together, temperature=temperature, label_smoothing=label_smoothing, term=term
        )
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
    device, width = batch.input_ids.device, batch.response_mask.shape[1]
    rows, columns = batch.trained // width, batch.trained % width
    # The token at prompt_length + t is predicted by the position before it.
    before = torch.tensor(batch.prompt_lengths) - 1
    if is_packed(base_model):
        hidden, origins = _packed_hidden(base_model, batch)
    else:
        # Padding is on the right and the model is causal, so no token that is read sees it: no mask is needed.
        hidden = base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        origins = torch.arange(len(batch.responses)) * batch.input_ids.shape[1]
    first = (origins + before).to(device, non_blocking=True)
    picked: Tensor = hidden.index_select(0, first[rows] + columns)
    return picked


def _packed_hidden(base_model: Any, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The last hidden states [N, H] of a row of all responses, and the row's `origins`, on the CPU."""
    on_cpu = packed_row(batch.total_lengths, batch.prompt_lengths, batch.same_prompts)
    row = on_cpu.to(batch.input_ids.device)
    hidden: Tensor = base_model(
        input_ids=batch.input_ids.flatten()[row.places][None],
        position_ids=row.positions[None],
        use_cache=False,
        cu_seq_lens_q=row.query_bounds,
        cu_seq_lens_k=row.key_bounds,
        max_length_q=row.queries_max,
        max_length_k=row.keys_max,
        repeats=row.repeats,
    ).last_hidden_state
    return hidden[0], on_cpu.origins


def per_token(values: Tensor, batch: TokenBatch) -> Tensor:
    """Put values [tokens], in the order of the response mask, into [B, T], 0 off the mask."""
    shape = batch.response_mask.shape
    return values.new_zeros(shape.numel()).scatter(0, batch.trained, values).view(shape)
