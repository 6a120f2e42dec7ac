"""Teachers of a scorer in vLLM, each with an engine of its own, for models that a single GPU's torch does not hold."""

import json
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from resources.model_config import CONFIG, model_fields, positions_max
from storage.records import layout, model_files
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import pull_some, read_manifest
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig, longest_scored
from tasks.learning.batching import TokenBatch
from tasks.learning.distillation import TokenScores
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.vllm_scores import VllmScorer

log = logging.getLogger(__name__)


class VllmTeacher:
    """A teacher whose scores vLLM computes."""

    def __init__(self, scorer: VllmScorer) -> None:
        self._scorer = scorer

    def scores(self, batch: TokenBatch, temperature: float, top_k: int, vocabulary: int) -> TokenScores:
        """As `Teacher.scores`; the head has as many tokens as the scorer was made for, and raises its errors."""
        rows = zip(batch.input_ids.tolist(), batch.total_lengths, strict=True)
        told = self._scorer.scores(
            [row[:length] for row, length in rows], temperature=temperature or 1.0, vocabulary=vocabulary
        )
        ids, logprobs = [], []
        for each, length, mask in zip(told, batch.prompt_lengths, batch.response_mask.numpy(), strict=True):
            # The first token of the response is the first behind the prompt, whose own first has no row.
            places = length - 1 + np.flatnonzero(mask)
            ids.append(each.ids[places])
            logprobs.append(each.logprobs[places])
        both = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(logprobs))
        head = slice(1, 1 + min(top_k, vocabulary))
        return TokenScores(both[1][:, 0], both[0][:, 0] == both[0][:, 1], both[0][:, head], both[1][:, head])


class VllmTeachers:
    """The teachers of a run in vLLM, each started at its first use.

    Args:
        store: The run's store.
        config: `trainer` (dtype and device) is used, and what limits the length of responses.
        teacher: The section `teacher`.
        vocabulary: The policy's number of tokens.
    """

    def __init__(self, store: ObjectStore, config: RunConfig, teacher: TeacherConfig, vocabulary: int) -> None:
        self._store, self._config, self._teacher = store, config, teacher
        self._top_k = max(1, teacher.head_size(vocabulary))
        self._started: dict[str, VllmScorer] = {}

    def start(self, names: Iterable[str]) -> None:
        """Start the engines of some teachers; raises as `named`."""
        for name in sorted(set(names)):
            self.named(name)

    def named(self, name: str) -> VllmTeacher:
        """A teacher of the run; raises ObjectMissing, CorruptObject, EngineDied, and EngineError with its field."""
        if name not in self._started:
            try:
                self._started[name] = self._start(name)
            except EngineError as error:
                if type(error) is not EngineError:
                    raise
                # The engines of members name their own fields.
                text = str(error).replace("rollout.vllm", "teacher.vllm").replace("rollout.engine", "teacher.engine")
                raise EngineError(f"{self._teacher.field_of(name)}: {text}") from error
        return VllmTeacher(self._started[name])

    def close(self) -> None:
        """End all engines."""
        while self._started:
            self._started.popitem()[1].close()

    def _start(self, name: str) -> VllmScorer:
        prefix = layout.teacher(name)
        manifest = read_manifest(self._store, prefix)
        fields = manifest.metadata["config"]
        reach = positions_max(fields)
        with model_files.downloaded(self._store) as policy:
            longest = longest_scored(
                self._config, positions_max(model_fields(policy)), None if reach is None else reach - 1
            )
        if longest is None:
            raise EngineError("config.json has no max_position_embeddings; set rollout.context_length")
        trainer = self._config.trainer
        with tempfile.TemporaryDirectory(prefix="gleaner-teacher-") as folder:
            (Path(folder) / CONFIG).write_text(json.dumps(fields), encoding="utf-8")
            scorer = VllmScorer(
                Path(folder),
                pull_some(self._store, prefix, manifest, list(manifest.tensors)),
                dtype=trainer.dtype,
                longest=longest,
                top_k=self._top_k,
                device=trainer.device,
                config=self._teacher.vllm_of_each,
            )
        log.info("teacher %r in %s, for sequences of up to %d tokens", name, scorer.name, longest)
        return scorer
