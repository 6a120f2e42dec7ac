"""The meaning of TRL's SFTConfig and DPOConfig in a run; other scripts go to `trl_meaning`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.adopting import trl_adapters, trl_inputs, trl_meaning
from tasks.adopting.adoption import Adoption
from tasks.adopting.trl_defaults import OF_EXAMPLES, TRAINING
from tasks.adopting.trl_script import TRAINER
from tasks.configuration.other_names import TRL

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
_LENGTH = "sampling.max_completion_length"
_TRACKED = "an evaluation samples responses, and grades them with evaluation.rewards; see the section `evaluation`"
REASONS = {
    "packing": "passes are packed on a GPU by themselves",
    "packing_strategy": "passes are packed on a GPU by themselves",
    "eval_packing": "passes are packed on a GPU by themselves",
    "padding_free": "passes are packed on a GPU by themselves",
    "truncation_mode": "nothing is cut: a longer completion is refused",
    "eos_token": "the tokenizer at policy.path has the token at the end of a text",
    "chat_template_path": "the chat template is that at policy.path; save yours there",
    "formatting_func": "rows are read as they are: save the formatted ones in a file",
    "compute_loss_func": "the loss is that of algorithm.kind",
    "data_collator": "rows are read as they are",
    "dataset_text_field": "a prompt stands apart from its completion; text alone is not learned",
    "ref_model": "the reference is the run's first weights",
    "precompute_ref_log_probs": "the reference is loaded beside the policy",
    "precompute_ref_batch_size": "the reference is loaded beside the policy",
    **dict.fromkeys(("eval_dataset", "eval_strategy", "eval_steps", "per_device_eval_batch_size"), _TRACKED),
    **dict.fromkeys(("compute_metrics", "preprocess_logits_for_metrics"), _TRACKED),
}
# What changes the loss of pairs, and is not here.
_OTHER_PAIRS = ("ld_alpha", "f_divergence_type", "use_weighting", "sync_ref_model")
_PARTS_OF_PAIRS = ("ref_model_mixup_alpha", "ref_model_sync_steps", "f_alpha_divergence_coef", "discopop_tau")
_SAME_LOSS = ("nll", "chunked_nll")


def carry_over(adoption: Adoption) -> None:
    """Decide about all settings of a script, of GRPO or of examples."""
    kind = adoption.value(TRAINER)
    if kind is None:
        trl_meaning.carry_over(adoption)
        return
    adoption.ignore(TRAINER)
    own = OF_EXAMPLES[kind]
    adoption.defaults = {**adoption.defaults, **own}
    adoption.fill_in.pop("rewards")
    # For the check of a file whose loss is left open.
    adoption.fill_in["algorithm.kind"] = ("sft or dpo", kind)
    adoption.hide(own | TRAINING)
    adoption.carry("algorithm.kind", kind)
    trl_inputs.model(adoption)
    trl_inputs.rows(adoption)
    for name, reason in (trl_meaning.REASONS | REASONS).items():
        adoption.leave(name, reason)
    batch(adoption)
    _length(adoption)
    if kind == "dpo":
        _pairs(adoption)
    else:
        _likelihood(adoption)
    finish(adoption, own["learning_rate"])


def finish(adoption: Adoption, learning_rate: float) -> None:
    """Carry over optimizer, machine, trackers and adapters, and settle; learning_rate: TRL's default."""
    adoption.carry("optimizer.learning_rate", adoption.number("learning_rate", learning_rate), "learning_rate")
    trl_meaning.schedule(adoption)
    trl_meaning.warmup(adoption)
    trl_meaning.machine(adoption)
    trl_meaning.trackers(adoption)
    trl_adapters.carry_over(adoption)
    adoption.settle(TRL)


def batch(adoption: Adoption, per_prompt: int = 1) -> None:
    """Rows of an optimizer step, which is an iteration.

    per_prompt: how many responses a group has here; TRL's has one, and the number of responses is kept.
    """
    rows, accumulated, processes = (adoption.count(name, plain) for name, plain in zip(_BATCH, (8, 1, 1), strict=True))
    number, rest = divmod(rows * accumulated * processes, per_prompt)
    if per_prompt > 1:
        adoption.carry("run.num_generations", per_prompt)
        reason = f"TRL samples one response to each of {number * per_prompt + rest} prompts, and here a prompt has"
        if rest:
            adoption.leave_open("run.num_prompts_per_step", f"{reason} at least {per_prompt}")
        elif adoption.is_known(*_BATCH):
            adoption.convert(_BATCH[0], f"{reason} {per_prompt}, so there are {number}")
    adoption.carry("run.num_prompts_per_step", number, *_BATCH)
    if adoption.has("num_processes"):
        adoption.carry("trainer.nproc_per_node", processes, "num_processes")
        adoption.carry("pools.train.gpus", processes, "num_processes")
    elif "run.num_prompts_per_step" in adoption.fields:
        reason = f"no script says it; run.num_prompts_per_step is for 1, so write {number} times yours"
        adoption.doubt("the number of processes", reason)


def _length(adoption: Adoption) -> None:
    """TRL's limit is of prompt and completion, and cuts."""
    if adoption.value("max_length", 1024) is None and adoption.is_known("max_length"):
        adoption.leave_open(_LENGTH, "the most tokens of a completion, as TRL's max_length is null")
        adoption.ignore("max_length")
        return
    adoption.carry(_LENGTH, adoption.count("max_length", 1024), "max_length")
    if _LENGTH in adoption.fields:
        reason = "TRL cuts prompt and completion there; here a completion with more tokens is refused"
        adoption.doubt("max_length", reason, adoption.line("max_length"))


def _likelihood(adoption: Adoption) -> None:
    kind = adoption.word("loss_type", "nll")
    if kind in _SAME_LOSS:
        adoption.ignore("loss_type")
    adoption.refuse("loss_type", f"Gleaner has no such loss; allowed: {', '.join(_SAME_LOSS)}", "algorithm.kind")
    adoption.carry("algorithm.label_smoothing", adoption.number("label_smoothing_factor", 0), "label_smoothing_factor")
    whole = "prompts are not learned; allowed: true, or none for rows with prompt and completion"
    if adoption.value("completion_only_loss") in (True, None):
        adoption.ignore("completion_only_loss")
    adoption.refuse("completion_only_loss", whole, "algorithm.kind")
    if adoption.flag("assistant_only_loss", default=False):
        adoption.ignore("assistant_only_loss")
        reason = "set data.prompt_column to the column of whole conversations, and data.completion_column to null"
        adoption.doubt("assistant_only_loss", reason, adoption.line("assistant_only_loss"))


def _pairs(adoption: Adoption) -> None:
    adoption.carry("algorithm.beta", adoption.number("beta", 0.1), "beta")
    given, weights = adoption.value("loss_type", ["sigmoid"]), adoption.value("loss_weights")
    kinds = given if isinstance(given, list) else [given]
    shares = weights if isinstance(weights, list) and len(weights) == len(kinds) else [1.0] * len(kinds)
    named: Mapping[str, Any] = dict(zip(map(str, kinds), shares, strict=True))
    first, share = _pair_loss(named)
    if not adoption.is_known("loss_type", "loss_weights"):
        adoption.leave_open("algorithm.kind", "the losses of the pairs are not known; dpo is sigmoid or robust")
    if first is None:
        reason = "Gleaner has sigmoid or robust, with weight 1, and sft beside it"
        adoption.refuse("loss_type", reason, "algorithm.kind")
        adoption.leave("loss_weights", "it belongs to losses that Gleaner has not")
        adoption.leave("label_smoothing", "it belongs to a loss that Gleaner has not")
    else:
        adoption.carry("algorithm.rpo_alpha", float(share), "loss_type", "loss_weights")
    if first == "robust":
        adoption.carry("algorithm.label_smoothing", adoption.number("label_smoothing", 0), "label_smoothing")
    adoption.leave("label_smoothing", "the loss sigmoid does not read it; see robust")
    for name in _OTHER_PAIRS:
        adoption.refuse(name, "the loss is DPO's, with the run's first weights as its reference", "algorithm.kind")
    for name in _PARTS_OF_PAIRS:
        adoption.leave(name, "nothing here reads it")


def _pair_loss(named: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The loss of a pair, None for one that Gleaner has not, and the weight of the likelihood beside it."""
    others: Sequence[str] = [name for name in named if name != "sft"]
    share = named.get("sft", 0.0)
    fits = len(others) == 1 and others[0] in ("sigmoid", "robust") and named[others[0]] == 1
    is_number = isinstance(share, int | float) and not isinstance(share, bool) and share >= 0
    return (others[0], share) if fits and is_number else (None, 0.0)
