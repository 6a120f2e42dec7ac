"""A reward model: a sequence classification model in Hugging Face's format that scores responses in batches.

This module runs in the worker process only, as the only file of grading that imports torch. The folder is checked
first, without weights; weights are loaded later.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tasks.grading.binding import ProcessSpoiled
from tasks.grading.model_folder import ModelFolder, one_line
from tasks.grading.reward import GradingCase, GradingError, RewardOutcome

# A tokenizer without a limit gives a very large number as its limit.
_LENGTH_MAX = 1 << 30
# By how much padding may change a score, relative to the score if that is above 1. Rounding in tens of layers stays
# below this, whereas an architecture that attends to its padding does not.
_PADDING_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """The settings of a reward model, from RewardConfig.

    Attributes:
        name: The reward's name in the run.
        folder: The folder of the model.
        label: The index of the logit that is the score; None for a model with a single label.
        device: "auto", "cpu" or "cuda".
        dtype: The name of torch's dtype.
        batch_tokens_max: The most tokens of a batch, padding included; a longer input is a batch alone.
    """

    name: str
    folder: str
    label: int | None
    device: str
    dtype: str
    batch_tokens_max: int = 16_384


class RewardModel:
    """One reward model. Raises GradingError if its folder cannot be used, naming the reward and the setting."""

    def __init__(self, settings: RewardModelSettings) -> None:
        transformers_logging.disable_progress_bar()
        self._settings = settings
        self._folder = ModelFolder(settings.name, Path(settings.folder))
        shapes = self._folder.tensor_shapes()
        config = self._folder.read("configuration", AutoConfig)
        is_quantized = self._folder.check_quantization(config)
        self._label = self._chosen_label(config.num_labels)
        self._tokenizer: Any = self._folder.read("tokenizer", AutoTokenizer)
        self._text = config.get_text_config()
        # The batch must be padded with the token by which the model finds the last real token.
        self._pad_id: int | None = getattr(self._text, "pad_token_id", None)
        if self._pad_id is not None and not 0 <= self._pad_id < self._text.vocab_size:
            raise self._folder.refused(
                f"pads with the token {self._pad_id}, which its {self._text.vocab_size} tokens lack"
            )
        skeleton = self._skeleton(config)
        self._length_max = self._longest(skeleton)
        self._check_weights(skeleton, shapes, is_quantized)
        self._model: Any = None
        self._tokens_max = settings.batch_tokens_max

    def load(self) -> None:
        """Load the weights, and try whether padding changes a score.

        Raises GradingError if weights are missing or the device does not exist.
        """
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
        model, found = self._folder.read("weights", AutoModelForSequenceClassification, **options)
        if found["missing_keys"]:
            raise self._folder.refused(f"lacks the weights {', '.join(sorted(found['missing_keys'])[:5])}")
        model.config.use_cache = False
        self._model = model.to(device).eval().requires_grad_(requires_grad=False)
        self._tokens_max = 1 if self._looks_at_padding() else settings.batch_tokens_max

    def check(self, cases: Sequence[GradingCase]) -> None:
        """Raise GradingError for the first case that cannot be tokenised for the model."""
        for case in cases:
            found = self._encode(case)
            if isinstance(found, RewardOutcome):
                raise GradingError(
                    f"reward {self._settings.name!r}: the prompt {json.dumps(case.prompt)[:200]} with the answer "
                    f"{case.completion!r} {found.error}"
                )

    def score(self, cases: Sequence[GradingCase]) -> list[float | RewardOutcome]:
        """The logit of the label for each case, or an outcome with an error for a case without a usable input.

        Raises ProcessSpoiled after a CUDA error other than a lack of memory.
        """
        inputs = [self._encode(case) for case in cases]
        scores: dict[int, float] = {}
        wanted = [index for index, ids in enumerate(inputs) if not isinstance(ids, RewardOutcome)]
        lengths = [len(inputs[index]) for index in wanted]  # type: ignore[arg-type]
        for places in batches_by_length(lengths, self._tokens_max):
            batch = [wanted[place] for place in places]
            scores.update(zip(batch, self._forward([inputs[index] for index in batch]), strict=True))
        if self._model.device.type == "cuda":
            # A trainer on the same device needs the memory that this process would keep cached.
            torch.cuda.empty_cache()
        return [ids if isinstance(ids, RewardOutcome) else scores[index] for index, ids in enumerate(inputs)]

    def _forward(self, inputs: Sequence[Any]) -> list[float]:
        """One score per input, in one pass.

        Models that read the score at the last token search backwards for a token that is not padding. If the
        configuration has no padding token, a token that occurs in none of the inputs serves as padding, because an
        input may end with the tokenizer's padding token.
        """
        pad_id = self._pad_id
        if pad_id is None and len(inputs) > 1:
            pad_id = unused_token(inputs, self._text.vocab_size)
            if pad_id is None:
                return [score for ids in inputs for score in self._forward([ids])]
        self._model.config.get_text_config().pad_token_id = pad_id
        longest = max(len(ids) for ids in inputs)
        input_ids = torch.full((len(inputs), longest), pad_id or 0, dtype=torch.long)
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
        """Prompt and completion in the reward model's own tokens, never truncated; or an outcome with an error."""
        try:
            ids = self._token_ids(case)
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author
            return RewardOutcome(None, f"cannot be put into the reward model's tokens: {type(error).__name__}: {error}")
        if not ids:
            return RewardOutcome(None, "has no tokens for its reward model")
        if len(ids) > self._length_max:
            return RewardOutcome(None, f"has {len(ids)} tokens for its reward model; allowed: {self._length_max}")
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
        # A text that is too long for the model is reported as an error later, so the tokenizer need not warn.
        return [int(token) for token in self._tokenizer(text, verbose=False)["input_ids"]]

    def _chosen_label(self, num_labels: int) -> int:
        label = self._settings.label
        if label is None and num_labels == 1:
            return 0
        if label is None or label >= num_labels:
            allowed = "0 or null" if num_labels == 1 else f"0 to {num_labels - 1}, because the model has several labels"
            raise GradingError(f"reward {self._settings.name!r}: label: value {json.dumps(label)}; allowed: {allowed}")
        return label

    def _longest(self, skeleton: Any) -> int:
        """The most tokens of an input: the least limit of the model and its tokenizer."""
        limits = [getattr(self._text, "max_position_embeddings", None), self._tokenizer.model_max_length]
        # RoBERTa and similar models count positions from the one after the padding's.
        limits += [
            module.num_embeddings - module.padding_idx - 1
            for name, module in skeleton.named_modules()
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        ]
        known = [int(limit) for limit in limits if limit and 0 < limit < _LENGTH_MAX]
        if not known:
            raise GradingError(
                f"reward {self._settings.name!r}: model: no limit on its input; set model_max_length in its "
                "tokenizer_config.json"
            )
        return min(known)

    def _skeleton(self, config: Any) -> Any:
        """The model without weights."""
        try:
            with torch.device("meta"):
                return AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        except Exception as error:
            raise self._folder.refused(f"is no sequence classification model: {one_line(error)}") from error

    def _check_weights(self, skeleton: Any, shapes: Mapping[str, tuple[int, ...]], is_quantized: bool) -> None:
        """Refuse a model whose files lack the head or the whole body, because missing weights would be random."""
        below = f"{skeleton.base_model_prefix}."
        wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
        head = [name for name in wanted if not name.startswith(below)]
        absent = [name for name in head if name not in shapes]
        if absent:
            raise self._folder.refused(f"lacks the weights {', '.join(absent)}, with which it would give a reward")
        for name in head:
            if shapes[name] != wanted[name] and not is_quantized:
                raise self._folder.refused(
                    f"holds {name} of shape {list(shapes[name])}; its config.json asks for {list(wanted[name])}"
                )
        # transformers also accepts names without this prefix.
        if len(head) < len(wanted) and not any(name.startswith(below) or below + name in wanted for name in shapes):
            raise self._folder.refused(f"lacks all weights whose names begin with {below!r}")

    def _looks_at_padding(self) -> bool:
        """Whether a short input has another score beside a longer input than alone, because of its padding.

        Some architectures attend to their padding. This call also does CUDA's initialisation at first use.
        """
        alone, *rest = (
            self._encode(GradingCase(0, "1", text, (), {})) for text in ("", *(" 2" * n for n in (64, 4, 1)))
        )
        longer = [ids for ids in rest if not isinstance(ids, RewardOutcome)]
        if isinstance(alone, RewardOutcome) or not longer:
            return False
        [score] = self._forward([alone])
        padded = self._forward([longer[0], alone])[1]
        return abs(score - padded) > _PADDING_TOLERANCE[self._settings.dtype] * max(1.0, abs(score))


def batches_by_length(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Divide the indices of `lengths`, the longest first, into batches of at most `tokens_max` padded tokens.

    A sequence longer than the limit is a batch of its own. Equal lengths keep their order.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= tokens_max:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def unused_token(inputs: Sequence[Sequence[int]], vocab_size: int) -> int | None:
    """The first of `vocab_size` tokens that occurs in none of the inputs; None if all occur."""
    used = {token for ids in inputs for token in ids}
    return next((token for token in range(vocab_size) if token not in used), None)
