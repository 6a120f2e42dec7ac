"""Teachers: the models from which a policy learns, stored in the run and loaded when a response is to be scored.

A teacher is a causal language model without gradient, beside the policy, and like it whole or divided among ranks. A
trainer whose micro-batches are scored already, as in a replay, loads no teacher.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from resources.model_config import CONFIG
from storage.records import layout
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import pull_some, read_manifest
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.distillation import TokenScores, score_tokens
from tasks.learning.packing import pack_if_equal
from tasks.learning.policy import Policy, probe
from tasks.learning.ranks import Ranks
from tasks.learning.scoring import Scorer, completion_hidden
from tasks.learning.shared_reading import read_shared
from tasks.learning.token_objective import HeadTerm, TokenLoss
from tasks.learning.trained_model import compute_dtype


class HeadScorer(Scorer):
    """A Scorer that also gives the most likely tokens at each place."""

    def forward(
        self,
        batch: TokenBatch,
        temperature: float,
        loss: TokenLoss | None = None,
        together: Sequence[int] = (),
        label_smoothing: float = 0.0,
        term: HeadTerm | None = None,
        *,
        top_k: int | None = None,
        vocabulary: int | None = None,
    ) -> tuple[Tensor, ...]:
        """With `top_k`, the tensors of a TokenScores in order; else as in `Scorer`.

        vocabulary: the number of tokens, from the first on, over which distributions are normalised; None: all.
        """
        if top_k is None:
            return super().forward(batch, temperature, loss, together, label_smoothing, term)
        hidden, head = completion_hidden(self.model.base_model, batch), self.model.get_output_embeddings()
        weight, bias = head.weight[:vocabulary], None if head.bias is None else head.bias[:vocabulary]
        targets = batch.completion_ids.flatten()[batch.trained]
        found = score_tokens(hidden, weight, bias, targets, temperature=temperature or 1.0, top_k=top_k)
        return tuple(vars(found).values())


class Teacher(Policy):
    """A causal language model that scores tokens and is not trained. Arguments and errors are those of Policy."""

    SCORER: ClassVar[type[Scorer]] = HeadScorer

    def scores(self, batch: TokenBatch, temperature: float, top_k: int, vocabulary: int) -> TokenScores:
        """The scores of the tokens in the response mask, in the order of the mask, on the CPU.

        top_k and vocabulary: as in `HeadScorer`; the head has at most `vocabulary` tokens.
        """
        with torch.no_grad():
            found = self._scorer(
                batch.to(self.device), temperature, top_k=min(top_k, vocabulary), vocabulary=vocabulary
            )
        return TokenScores(*(each.cpu() for each in found))


class Teachers:
    """The teachers of a run, each loaded at its first use.

    Args:
        store: The run's store.
        config: dtype and device are used.
        ranks: The ranks among which each teacher is divided.
    """

    def __init__(self, store: ObjectStore, config: TrainerConfig, ranks: Ranks) -> None:
        self._store, self._config, self._ranks = store, config, ranks
        self._loaded: dict[str, Teacher] = {}

    @property
    def loaded(self) -> list[Teacher]:
        """The teachers that are in memory."""
        return list(self._loaded.values())

    def named(self, name: str) -> Teacher:
        """A teacher of the run; every rank must call `named`. Raises ObjectMissing, CorruptObject and PolicyError."""
        if name not in self._loaded:
            # A trainer that finds stored scores loads no teacher, and must go on with the same random numbers.
            on_gpu = [self._ranks.device] if self._ranks.device.type == "cuda" else []
            with torch.random.fork_rng(devices=on_gpu):
                self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> Teacher:
        prefix = layout.teacher(name)
        with self._ranks.failing_together():
            manifest = read_manifest(self._store, prefix)
        tensors = read_shared(self._ranks, manifest.tensors, partial(pull_some, self._store, prefix, manifest))
        with tempfile.TemporaryDirectory(prefix="gleaner-teacher-") as folder:
            (Path(folder) / CONFIG).write_text(json.dumps(manifest.metadata["config"]), encoding="utf-8")
            teacher = Teacher(folder, tensors, self._config, trainable=False, ranks=self._ranks)
        # As for a policy: float32, and a CPU, keep padded passes.
        if compute_dtype(self._config) is not None and teacher.device.type == "cuda":
            with torch.no_grad():
                pack_if_equal(
                    teacher.module,
                    lambda batch: teacher.logprobs(batch, 1.0)[0],
                    probe(teacher, (1, 3, 2)),
                    self._ranks,
                )
        return teacher
