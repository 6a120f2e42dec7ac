"""Features of a prompt that correlate with the lengths of responses, computed without a model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from storage.records.length_tables import FEATURES, HASHED

# Columns in which datasets keep the answer; verl nests it one level deep.
ANSWERS = frozenset({"answer", "solution", "worked", "ground_truth", "completion", "response", "target"})
# The first tokens of a long prompt tell enough, and the limit keeps an iteration's learning within a second.
TOKENS_MAX = 1024
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


class Prompt(Protocol):
    """The attributes of a prompt that features need; storage.records.prompt_table.PromptRow has all three."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class PromptFeatures:
    """Features of n prompts, with hashed n-grams as a sparse matrix [n, HASHED] whose rows have norm 1.

    Attributes:
        digests: digest of each prompt's id, uint64 [n].
        dense: 1, ln(1 + prompt tokens), 1 if an answer is known, ln(1 + characters of the answer), [n, FEATURES].
        rows: row of each entry of the matrix, [entries].
        buckets: column of each entry, [entries].
        values: ln(1 + count of the n-gram), divided by the norm of the row, [entries].
    """

    digests: npt.NDArray[np.uint64]
    dense: npt.NDArray[np.float64]
    rows: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.digests)

    def take(self, groups: npt.NDArray[np.bool_]) -> "PromptFeatures":
        """The features of the prompts at which `groups` [n] is true, in the present order."""
        kept = groups[self.rows]
        numbers = np.cumsum(groups) - 1
        return PromptFeatures(
            digests=self.digests[groups],
            dense=self.dense[groups],
            rows=numbers[self.rows[kept]],
            buckets=self.buckets[kept],
            values=self.values[kept],
        )


def prompt_features(prompts: Sequence[Prompt]) -> PromptFeatures:
    """The features of prompts; a prompt is recognised by its id."""
    dense = np.ones((len(prompts), FEATURES))
    for row, prompt in enumerate(prompts):
        answer = answer_characters(prompt.columns)
        dense[row, 1:] = np.log1p(len(prompt.token_ids)), answer > 0, np.log1p(answer)
    cells, counts = np.unique(_cells(prompts), return_counts=True)
    rows, buckets = np.divmod(cells.astype(np.int64), HASHED)
    values = np.log1p(counts)
    norms = np.sqrt(np.bincount(rows, values**2, minlength=len(prompts)))
    return PromptFeatures(
        digests=np.array([prompt_digest(prompt.prompt_id) for prompt in prompts], dtype=np.uint64),
        dense=dense,
        rows=rows,
        buckets=buckets,
        values=values / norms[rows],
    )


def answer_characters(columns: dict[str, Any]) -> int:
    """Characters of the longest text in a column of ANSWERS, in the row or one level below; 0 without such a text."""
    nested = [inner for inner in columns.values() if isinstance(inner, dict)]
    found = (value for held in (columns, *nested) for name, value in held.items() if name.lower() in ANSWERS)
    return max((len(value) for value in found if isinstance(value, str)), default=0)


def prompt_digest(prompt_id: str) -> int:
    """The digest by which the lengths of a prompt are kept."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")


def _cells(prompts: Sequence[Prompt]) -> npt.NDArray[np.signedinteger[Any]]:
    """Cells (row * HASHED + bucket) of every token and of every pair of neighbours."""
    ids = [np.array(prompt.token_ids[:TOKENS_MAX], dtype=np.uint64) for prompt in prompts]
    tokens = np.concatenate([np.zeros(0, np.uint64), *ids])
    # Sorting takes longest, and is several times faster with four bytes.
    kind = np.int32 if len(prompts) * HASHED < 2**31 else np.int64
    rows = np.repeat(np.arange(len(prompts), dtype=kind), np.array([len(part) for part in ids], dtype=np.int64))
    single, left, right = (np.uint64(multiplier) for multiplier in _MULTIPLIERS)
    shift = np.uint64(64 - HASHED.bit_length() + 1)
    # Products of arrays wrap; the high bits of a product are well mixed.
    unigrams = ((tokens + np.uint64(1)) * single) >> shift
    mixed = ((tokens[:-1] + np.uint64(1)) * left) ^ ((tokens[1:] + np.uint64(1)) * right)
    bigrams = (mixed * single) >> shift
    together = rows[1:] == rows[:-1]
    return np.concatenate([rows * HASHED + unigrams.astype(kind), (rows[1:] * HASHED + bigrams.astype(kind))[together]])
