"""Policy: a Hugging Face causal language model for the trainer, which needs log-probs and named tensors.

Parameters that are trained are float32 whatever the compute dtype. This module also checks that the head is a plain
linear layer, and that training draws no random numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from resources.model_config import positions_max
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch, collate
from tasks.learning.head import check_head
from tasks.learning.ranks import Ranks
from tasks.learning.scoring import Scorer
from tasks.learning.sharded import Stored, Unread, header, skeleton, whole_stored
from tasks.learning.token_objective import HeadTerm, TokenLoss
from tasks.learning.trained_model import PolicyError, TrainedModel, compute_dtype, read_architecture, training_device
from tasks.models.stored_names import StoredNames, StoredNamesError

# So many that noise in a choice among a few experts shows.
_PROBE_TOKENS = 64
_PROBE_PROMPT_TOKENS = 4


class Scores(Protocol):
    """A policy or a reference: anything that gives log-probs of tokens."""

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As in `Policy`."""


class Policy(TrainedModel):
    """A causal language model on one device, or divided among ranks. Not thread-safe.

    Args:
        model_dir: A directory with the model's config.json.
        tensors: Name -> values, with the names of the model's files or of the module; a tied tensor may have any of its
            names, or several names with equal values.
        config: dtype, device and gradient_checkpointing are used.
        trainable: Which parameters have gradients; False for a reference policy.
        ranks: The ranks that train the policy; default: this process alone, on the device of the configuration.
        adapt: A function that changes the module's layers in place before tensors are loaded.

    Raises:
        PolicyError: The model does not exist, has no plain linear head, draws random numbers in training, or cannot
            compute in the dtype; or tensors have wrong names or shapes.
    """

    SCORER: ClassVar[type[Scorer]] = Scorer

    def __init__(
        self,
        model_dir: str | Path,
        tensors: Mapping[str, Stored],
        config: TrainerConfig,
        *,
        trainable: bool | Callable[[str], bool] = True,
        ranks: Ranks | None = None,
        adapt: Callable[[Any], None] = lambda _module: None,
    ) -> None:
        ranks = ranks or Ranks(device=training_device(config.device))
        # Kept, because weights are loaded and named when the directory may be gone.
        self._architecture = read_architecture(Path(model_dir))
        # What is frozen mostly stays in the compute dtype, so it is never made in float32.
        dtype = None if trainable is True else compute_dtype(config)
        module = build_module(Path(model_dir), ranks, adapt, dtype)
        check_head(module)
        self._scorer = self.SCORER(module)
        super().__init__(module, tensors, config, trainable=trainable, root=self._scorer, ranks=ranks)
        try:
            _check_noise(self)
        except RuntimeError as error:
            if config.dtype == "float32" or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = " ".join(str(error).split())[:200]
            raise PolicyError(
                f"trainer.dtype: value {config.dtype!r}; allowed with {type(module).__name__}: 'float32', because a "
                f"pass fails: {reason}"
            ) from None

    def load_tensors(self, tensors: Mapping[str, Stored]) -> None:
        """Replace all values in place; raises PolicyError, with nothing changed, if names, shapes or ties differ."""
        if any(isinstance(tensor, Unread) for tensor in tensors.values()):
            # A checkpoint's: they have the module's names, and are read in their order.
            self.load_trained(tensors)
            return
        self._replace(own_tensors(self._architecture, tensors))

    def stored_names(self, stored: Mapping[str, Tensor]) -> StoredNames:
        """The module's names of stored tensors, which may be on the device meta; raises PolicyError."""
        return names_in(self._architecture, stored)

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens in the response mask under softmax(logits / temperature), and entropies.

        A temperature of 0 (greedy) counts as 1, as in the sampler.

        Args:
            batch: B responses, completions padded to T.
            temperature: At least 0.

        Returns:
            Log-probs [B, T] with gradient, and entropies [B, T] in nats without; both 0 off the mask, on `device`.
        """
        logprobs, entropy = self._scorer(batch.to(self.device), temperature)
        return logprobs, entropy

    def objective(
        self,
        batch: TokenBatch,
        temperature: float,
        loss: TokenLoss,
        together: Sequence[int] = (),
        label_smoothing: float = 0.0,
        term: HeadTerm | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies as in `logprobs`, but without gradient, and the sum of losses, with gradient.

        A call saves a product with the head compared to `logprobs`; `tasks.learning.token_objective` explains how, and
        `together`, `label_smoothing`, which changes the log-probs, and `term`.
        """
        given = (batch.to(self.device), temperature, loss, together, label_smoothing, term)
        logprobs, entropy, total = self._scorer(*given)
        return logprobs, entropy, total


def names_in(architecture: Any, stored: Mapping[str, Tensor]) -> StoredNames:
    """The names of stored tensors in the module of a `read_architecture`; raises PolicyError."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - costs seconds, and only here

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    try:
        return StoredNames(module, stored)
    except StoredNamesError as error:
        raise PolicyError(f"tensors: {error}") from None


def own_tensors(architecture: Any, stored: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a causal language model under the module's names, each converted when reached.

    With several ranks, every rank must call `own_tensors` and iterate to the end. Raises PolicyError, before the first
    tensor, for names, shapes or values of tied tensors that do not fit the model.
    """
    names = names_in(architecture, {name: header(tensor) for name, tensor in stored.items()})
    try:
        names.check_ties(stored, whole_stored)
    except StoredNamesError as error:
        raise PolicyError(f"tensors: {error}") from None
    return names.to_module(stored, whole_stored)


def build_module(model_dir: Path, ranks: Ranks, adapt: Callable[[Any], None], dtype: torch.dtype | None = None) -> Any:
    """Build a causal language model without values, with parameters in float32, or in `dtype` if given."""
    architecture = read_architecture(model_dir)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - costs seconds, and only here

    with skeleton(ranks, dtype):
        try:
            module = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - fields of a wrong kind raise anything in a model's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise PolicyError(f"model: no causal language model can be built of {str(model_dir)!r}: {reason}") from None
        adapt(module)
    return module


def probe(policy: Policy, parts: Sequence[int] = (1,)) -> TokenBatch:
    """A batch of responses to a fixed prompt for trials of a model; response i has 1 / parts[i] of the full length."""
    rows, reach = policy.module.get_input_embeddings().weight.shape[0], positions_max(policy.module.config.to_dict())
    tokens = [token % rows for token in range(min(_PROBE_TOKENS, reach or _PROBE_TOKENS))]
    prompt = tokens[: min(_PROBE_PROMPT_TOKENS, len(tokens) - 1)]
    longest = tokens[: len(tokens) - len(prompt)]
    completions = [longest[: -(-len(longest) // part)] for part in parts]
    logprobs = [[0.0] * len(completion) for completion in completions]
    return collate(range(len(parts)), [prompt] * len(parts), completions, logprobs)


def _check_noise(policy: Policy) -> None:
    """Refuse models with noise in training, because log-probs would differ from the noiseless sampler's."""
    batch = probe(policy)
    before = _generators(policy.device)
    with torch.no_grad():
        first = policy.logprobs(batch, 1.0)[0]
        # Some draw a number and make nothing of it, such as whether to leave out a layer with a probability of zero.
        if all(map(torch.equal, before, _generators(policy.device))) or torch.equal(
            first, policy.logprobs(batch, 1.0)[0]
        ):
            return
    raise PolicyError(
        f"model: {type(policy.module).__name__} draws random numbers in training, so that the same policy would give "
        "other log-probs than in sampling; allowed: models without noise"
    )


def _generators(device: torch.device) -> list[Tensor]:
    """The states of torch's generators from which a pass on `device` may draw."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
