"""TRL's arm of benchmarks.trainer, in a process of its own: GRPOTrainer.train() on given responses.

It runs under a Python that has trl and need not have Gleaner's requirements. Generation and rewards are left out; all
else in a step is TRL's own: micro-batches, loss, gradient, metrics, clipping and AdamW.
"""

import importlib
import tempfile
import warnings
from typing import Any

import torch

from benchmarks.trainer_work import (
    CLIP_RATIO_HIGH,
    CLIP_RATIO_LOW,
    GRAD_NORM_MAX,
    LEARNING_RATE,
    Meter,
    Sample,
    Work,
    keep_answers_apart,
    samples,
    work_of_arguments,
)


def main() -> None:
    """Train as many steps as the argument says, one per line on standard input."""
    keep_answers_apart()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work = work_of_arguments()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(work, folder)
        trainer.train()


def _trainer(work: Work, folder: str) -> Any:
    return grpo_trainer(work, samples(work), folder, _callback(importlib.import_module("transformers")), use_cpu=True)


def grpo_trainer(work: Work, rows: list[Sample], folder: str, callback: Any, **settings: Any) -> Any:
    """TRL's trainer on the given responses. settings: further ones of its GRPOConfig."""
    trl, transformers = importlib.import_module("trl"), importlib.import_module("transformers")
    count = work.prompts * work.generations
    defaults = {"bf16": False, "gradient_checkpointing": False}
    arguments = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work.responses_per_pass,
        gradient_accumulation_steps=count // work.responses_per_pass,
        num_generations=work.generations,
        max_completion_length=work.completion_length,
        max_steps=work.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=GRAD_NORM_MAX,
        loss_type="dapo",
        beta=0.0,
        epsilon=CLIP_RATIO_LOW,
        epsilon_high=CLIP_RATIO_HIGH,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **{**defaults, **settings},
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work.model_dir,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=arguments,
        processing_class=_tokenizer(work, transformers),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=importlib.import_module("datasets").Dataset.from_dict({"prompt": ["a"] * work.prompts}),
        callbacks=[callback],
    )
    device = trainer.accelerator.device
    prepared = {name: value.to(device) for name, value in _prepared(rows).items()}
    trainer._generate_and_score_completions = lambda _batch: dict(prepared)  # noqa: SLF001 - where generation happens
    return trainer


def _callback(transformers: Any) -> Any:
    meter = Meter()
    norms: list[float] = []

    class Measure(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            if not norms:  # The first step is not timed.
                gradients = [parameter.grad for parameter in model.parameters()]
                norms.append(float(torch.nn.utils.get_total_norm(gradients)))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end(grad_norm=norms[0])

    return Measure()


def _tokenizer(work: Work, transformers: Any) -> Any:
    """A tokenizer with one token per letter; the trainer requires one, but nothing is tokenized."""
    tokenizers = importlib.import_module("tokenizers")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"<{index}>": index for index in range(3, work.vocab_size)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")  # noqa: S106 - a token of text
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="<pad>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
    )


def _prepared(rows: list[Sample]) -> dict[str, torch.Tensor]:
    """The responses in TRL's form: prompts padded on the left, completions on the right."""
    prompts, completions = [row.prompt for row in rows], [row.completion for row in rows]
    prompt_length, completion_length = max(map(len, prompts)), max(map(len, completions))
    completion_mask = torch.tensor([[1] * len(ids) + [0] * (completion_length - len(ids)) for ids in completions])
    return {
        "prompt_ids": torch.tensor([[0] * (prompt_length - len(ids)) + ids for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (prompt_length - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([ids + [0] * (completion_length - len(ids)) for ids in completions]),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": completion_mask.sum(),
    }


if __name__ == "__main__":
    main()
