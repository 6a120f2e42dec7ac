"""A reward model: a sequence classification model in Hugging Face's format that scores responses in batches.

Runs in the worker process only, and is the one file of grading that imports torch. First the folder is checked without
reading a weight; the weights are loaded later.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tasks.grading.binding import ProcessSpoiled
from tasks.grading.reward import GradingCase, GradingError, RewardOutcome

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_INDEX = "model.safetensors.index.json"
# What a tokenizer says that knows no limit is a very large number.
_LENGTH_MAX = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """What RewardConfig says of a reward model, with the name it has in this run and the folder it is in."""

    name: str
    folder: str
    label: int | None
    device: str
    dtype: str
    batch_tokens_max: int
    max_length: int | None


class RewardModel:
    """One reward model. Raises GradingError for a folder that cannot be used, naming the reward and the setting."""

    def __init__(self, settings: RewardModelSettings) -> None:
        transformers_logging.disable_progress_bar()
        self._settings = settings
        self._folder = Path(settings.folder)
        if not self._folder.is_dir():
            raise self._refused("does not exist")
        if not (self._folder / "config.json").is_file():
            raise self._refused("has no config.json")
        tensors = self._tensor_names()
        config = self._read("a configuration", AutoConfig)
        self._label = self._chosen_label(config.num_labels)
        if not any((self._folder / name).is_file() for name in TOKENIZER_FILES):
            # Without any of them transformers makes a tokenizer that knows no word.
            raise self._refused(f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
        self._tokenizer: Any = self._read("a tokenizer", AutoTokenizer)
        self._text = config.get_text_config()
        # What the model looks for to find the last token must be what the batch is padded with.
        self._pad_id: int | None = getattr(self._text, "pad_token_id", None)
        if self._pad_id is None:
            self._pad_id = self._tokenizer.pad_token_id
        if self._pad_id is None:
            raise self._refused("names no padding token, neither in config.json (pad_token_id) nor in its tokenizer")
        if not 0 <= self._pad_id < self._text.vocab_size:
            raise self._refused(f"pads with the token {self._pad_id}, which its {self._text.vocab_size} tokens lack")
        self._length_max = self._longest()
        self._check_head(config, tensors)
        self._model: Any = None

    def load(self) -> None:
        """Load the weights; raises GradingError when some are missing, or there is no such device."""
        settings = self._settings
        has_cuda = torch.cuda.is_available()
        if settings.device == "cuda" and not has_cuda:
            raise GradingError(
                f"reward {settings.name!r}: device: value 'cuda'; allowed: 'cpu' or 'auto' on a machine without a GPU"
            )
        device = ("cuda" if has_cuda else "cpu") if settings.device == "auto" else settings.device
        options = {
            "dtype": getattr(torch, settings.dtype),
            "use_safetensors": True,
            "output_loading_info": True,
        }
        model, found = self._read("weights", AutoModelForSequenceClassification, **options)
        if found["missing_keys"]:
            raise self._refused(f"lacks the weights {', '.join(sorted(found['missing_keys'])[:5])}")
        model.config.get_text_config().pad_token_id = self._pad_id
        model.config.use_cache = False
        self._model = model.to(device).eval().requires_grad_(requires_grad=False)

    def score(self, cases: Sequence[GradingCase]) -> list[float | RewardOutcome]:
        """The logit of the label for each case, or an outcome with an error where there is none for an input.

        Raises ProcessSpoiled after an error of CUDA other than a lack of memory.
        """
        inputs = [self._encode(case) for case in cases]
        scores: dict[int, float] = {}
        wanted = [index for index, ids in enumerate(inputs) if not isinstance(ids, RewardOutcome)]
        lengths = [len(inputs[index]) for index in wanted]  # type: ignore[arg-type]
        for places in batches_by_length(lengths, self._settings.batch_tokens_max):
            members = [wanted[place] for place in places]
            scores.update(zip(members, self._forward([inputs[index] for index in members]), strict=True))
        return [ids if isinstance(ids, RewardOutcome) else scores[index] for index, ids in enumerate(inputs)]

    def _forward(self, inputs: Sequence[Any]) -> list[float]:
        longest = max(len(ids) for ids in inputs)
        input_ids = torch.full((len(inputs), longest), self._pad_id or 0, dtype=torch.long)
        mask = torch.zeros((len(inputs), longest), dtype=torch.long)
        for row, ids in enumerate(inputs):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        device = self._model.device
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=input_ids.to(device), attention_mask=mask.to(device)).logits
                scores: list[float] = logits[:, self._label].float().cpu().tolist()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        except RuntimeError as error:
            if device.type == "cuda":
                raise ProcessSpoiled(f"{type(error).__name__}: {error}") from error
            raise
        return scores

    def _encode(self, case: GradingCase) -> list[int] | RewardOutcome:
        """Prompt and completion in the reward model's own tokens; nothing is ever cut."""
        try:
            ids = self._token_ids(case)
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author
            return RewardOutcome(None, f"cannot be put into the reward model's tokens: {type(error).__name__}: {error}")
        if not ids:
            return RewardOutcome(None, "has no tokens for its reward model")
        if len(ids) > self._length_max:
            return RewardOutcome(
                None, f"has {len(ids)} tokens for its reward model; allowed: {self._length_max} (max_length)"
            )
        if max(ids) >= self._text.vocab_size:
            return RewardOutcome(None, f"has the token {max(ids)}, which its reward model lacks")
        return ids

    def _token_ids(self, case: GradingCase) -> list[int]:
        if isinstance(case.prompt, str):
            text = case.prompt + case.completion
        elif self._tokenizer.chat_template:
            conversation = [*case.prompt, {"role": "assistant", "content": case.completion}]
            ids = self._tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
            return [int(token) for token in ids]
        else:
            text = "\n".join([*(message["content"] for message in case.prompt), case.completion])
        # Longer texts than the model takes are an error here, not a warning.
        return [int(token) for token in self._tokenizer(text, verbose=False)["input_ids"]]

    def _chosen_label(self, num_labels: int) -> int:
        label = self._settings.label
        if label is None and num_labels == 1:
            return 0
        if label is None or label >= num_labels:
            allowed = "0 or null" if num_labels == 1 else f"0 to {num_labels - 1}, because the model has several labels"
            raise GradingError(f"reward {self._settings.name!r}: label: value {json.dumps(label)}; allowed: {allowed}")
        return label

    def _longest(self) -> int:
        """The most tokens of an input: what the configuration says, the model, and its tokenizer."""
        limits = [getattr(self._text, "max_position_embeddings", None), self._tokenizer.model_max_length]
        known = [int(limit) for limit in limits if limit and 0 < limit < _LENGTH_MAX]
        asked = self._settings.max_length
        if asked is None and not known:
            raise GradingError(f"reward {self._settings.name!r}: max_length: missing; the model does not say its own")
        if asked is not None and known and asked > min(known):
            raise GradingError(
                f"reward {self._settings.name!r}: max_length: value {asked}; allowed: 1 to {min(known)}, the model's"
            )
        return min(known) if asked is None else asked

    def _tensor_names(self) -> set[str]:
        """Of all tensors in the safetensors files, by their headers, which are compared with the files' sizes."""
        folder = self._folder
        index = folder / _INDEX
        files = sorted(folder.glob("*.safetensors"))
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError):
                raise self._refused(f"has an unreadable {_INDEX}") from None
            absent = sorted(names - {file.name for file in files})
            if absent:
                raise self._refused(f"lacks the file {absent[0]} of its {_INDEX}")
        if not files:
            raise self._refused("holds no .safetensors file, and pickles are never read")
        tensors: set[str] = set()
        for file in files:
            try:
                with safe_open(str(file), framework="numpy") as opened:
                    tensors.update(opened.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise self._refused(
                    f"holds {file.name}, which is not a whole safetensors file: {_line(error)}"
                ) from None
        return tensors

    def _check_head(self, config: Any, tensors: set[str]) -> None:
        """Refuse a model whose last layer is not in its files: it would be random, and so would every reward."""
        try:
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        except Exception as error:
            raise self._refused(f"is no sequence classification model: {_line(error)}") from error
        own = [name for name in model.state_dict() if not name.startswith(f"{model.base_model_prefix}.")]
        absent = [name for name in own if name not in tensors]
        if absent:
            raise self._refused(f"lacks the weights {', '.join(absent)}, with which it would give a reward")

    def _read(self, what: str, kind: Any, **options: Any) -> Any:
        try:
            return kind.from_pretrained(str(self._folder), local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # whatever damaged files make of the library that reads them
            raise self._refused(f"holds no usable {what.removeprefix('a ')}: {_line(error)}") from error

    def _refused(self, reason: str) -> GradingError:
        return GradingError(
            f"reward {self._settings.name!r}: model: value {str(self._folder)!r} {reason}; "
            "allowed: a Hugging Face directory with a sequence classification model"
        )


def batches_by_length(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Places in `lengths`, the longest first, in batches of at most `tokens_max` padded tokens.

    A sequence that is longer than the limit is a batch of its own. Equal lengths keep their order.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= tokens_max:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
