"""The meaning of TRL's GKDConfig and DistillationConfig in a run; other scripts go to `trl_examples`."""

from collections.abc import Mapping
from typing import Any

from tasks.adopting import trl_examples, trl_inputs, trl_meaning
from tasks.adopting.adoption import Adoption
from tasks.adopting.trl_defaults import OF_TEACHERS, TRAINING
from tasks.adopting.trl_script import TRAINER

# TRL's interpolation between both divergences. The teacher's KL to the policy stands at 0, the policy's at 1.
_DIVERGENCES = {0: "forward", 0.5: "jsd", 1: "reverse"}
_FILL_IN: dict[str, tuple[str, Any]] = {
    "teacher.path": ("the directory of the teacher, or its id on the hub", "teacher"),
    "teacher.top_k": (
        "TRL compares all tokens; here the teacher's likeliest 1 to 256 and the rest as one; null: the sampled token",
        8,
    ),
}
_UNREAD = "GKD's loss does not read it"
_REASONS = {
    **dict.fromkeys(("loss_type", "label_smoothing_factor", "completion_only_loss", "assistant_only_loss"), _UNREAD),
    "max_length": "prompts are not cut; data.max_prompt_length is a limit",
}


def carry_over(adoption: Adoption) -> None:
    """Decide about all settings of a script, of a trainer with a teacher or of another one."""
    kind = adoption.value(TRAINER)
    if kind not in OF_TEACHERS:
        trl_examples.carry_over(adoption)
        return
    adoption.ignore(TRAINER)
    own = OF_TEACHERS[kind]
    adoption.defaults = {**adoption.defaults, **own}
    adoption.fill_in.pop("rewards")
    adoption.fill_in |= _FILL_IN
    adoption.hide(own | TRAINING)
    trl_inputs.model(adoption)
    trl_inputs.rows(adoption)
    for name, reason in (trl_meaning.REASONS | trl_examples.REASONS).items():
        adoption.leave(name, reason)
    _model(adoption)
    _divergence(adoption, own["beta"])
    adoption.carry("sampling.temperature", adoption.number("temperature", own["temperature"]), "temperature")
    if kind == "gkd":
        _mixture(adoption, own["lmbda"])
        _conversations(adoption)
    else:
        trl_inputs.tools(adoption)
        length = "max_completion_length"
        adoption.carry("sampling.max_completion_length", adoption.count(length, own[length]), length)
        trl_meaning.sampling(adoption)
    trl_examples.batch(adoption, per_prompt=2)
    trl_examples.finish(adoption, own["learning_rate"])


def _model(adoption: Adoption) -> None:
    """The teacher and its revision."""
    path, revision, arguments = (f"teacher_model_{part}" for part in ("name_or_path", "revision", "init_kwargs"))
    if adoption.value(path) is not None or not adoption.is_known(path):
        adoption.carry("teacher.path", adoption.value(path), path)
    given, named = adoption.value(arguments), adoption.value(revision)
    if isinstance(given, Mapping):
        named = given.get("revision", named)
        if others := [name for name in given if name != "revision"]:
            adoption.leave(arguments, f"{', '.join(map(str, others))}: Gleaner loads the teacher itself")
        adoption.ignore(arguments)
    if named not in (None, "main") or not adoption.is_known(revision, arguments):
        adoption.carry("teacher.revision", named, revision, arguments)
    adoption.ignore(revision)


def _divergence(adoption: Adoption, default: float) -> None:
    beta = adoption.number("beta", default)
    kl = _DIVERGENCES.get(beta)
    if kl is not None or not adoption.is_known("beta"):
        adoption.carry("teacher.kl", kl, "beta")
        return
    allowed = ", ".join(f"{name} for beta {share}" for share, name in _DIVERGENCES.items())
    adoption.refuse("beta", f"{beta} given; allowed: {allowed}", "teacher.kl")


def _mixture(adoption: Adoption, default: float) -> None:
    """Which responses are learned: with a share of lmbda below 1 not only the policy's own."""
    if not adoption.is_known("lmbda", "seq_kd"):
        adoption.carry("teacher.weight", None, "lmbda", "seq_kd")
        return
    share, weight = adoption.number("lmbda", default), "teacher.weight"
    if share == 1:
        adoption.leave("seq_kd", "lmbda is 1, so the teacher writes no response")
        adoption.ignore("lmbda")
        return
    others = "the teacher's responses" if adoption.flag("seq_kd", default=False) else "the data's completions"
    reason = f"TRL learns {others} in {1 - share:.3g} of the batches, and here the policy's own are all; 1.0 trains so"
    adoption.leave_open(weight, f"lmbda {share:.3g}: {reason}")
    adoption.leave("seq_kd", "the teacher writes no response here")
    adoption.leave("lmbda", reason)


def _conversations(adoption: Adoption) -> None:
    """Prompts and lengths of GKD's trainer, whose divergence is not at the temperature of its samples."""
    length = "max_new_tokens"
    adoption.carry("sampling.max_completion_length", adoption.count(length, OF_TEACHERS["gkd"][length]), length)
    for name, reason in _REASONS.items():
        adoption.leave(name, reason)
    known = adoption.fields.get("sampling.temperature")
    if known is not None and known.value != 1:
        reason = "TRL samples there and compares at 1; here both are at sampling.temperature"
        adoption.doubt("temperature", reason, adoption.line("temperature"))
    if "data.prompt_column" not in adoption.fields:
        reason = "TRL drops the last one and the policy answers; save your rows without it, in data.prompt_column"
        adoption.doubt("messages", reason)
