"""The meaning of a TRL trainer's model and data in a run, and of GRPOTrainer's rewards and tools."""

from collections.abc import Mapping
from typing import Any

from tasks.adopting.adoption import Adoption
from tasks.configuration.problems import UNFILLED

_EVALUATION = "an evaluation has prompts of its own; see the section `evaluation`"
_ASKED = ("eval_steps", "eval_strategy", "per_device_eval_batch_size", "num_generations_eval", "eval_dataset")
_OF_MODEL = ("model_revision", "model_init_kwargs")
# TRL's think_format_reward, whose expression is matched from the beginning with DOTALL and MULTILINE, as ours is.
_THINK_FORMAT = r"<think>(?!.*<think>)(.*?)</think>.*"
_TRLS_OWN = "trl.rewards:"
_TURNS_MAX = 10_000


def carry_over(adoption: Adoption) -> None:
    """Decide about the trainer's model, data, rewards and tools."""
    model(adoption)
    rows(adoption)
    _rewards(adoption)
    tools(adoption)
    if adoption.has("the script itself"):
        reason = "rewards name functions of it, and to import it runs this line: move them to a module of their own"
        adoption.doubt("the script itself", reason, adoption.line("the script itself"))
        adoption.ignore("the script itself")
    for name in adoption.given:
        if name.startswith("class "):
            adoption.leave(name, "what it does beside its base is not read")


def evaluation(adoption: Adoption) -> None:
    """Its prompts, if the script evaluates; the rest is sampled as in training."""
    strategy = adoption.value("eval_strategy", "no")
    is_asked = adoption.has("eval_dataset") or not adoption.is_known("eval_dataset")
    if strategy in ("no", False, None) or not is_asked:
        reason = "eval_strategy is no, so TRL does not evaluate" if is_asked else _EVALUATION
        for name in _ASKED:
            if name == "eval_strategy" and strategy in ("no", False, None):
                adoption.ignore(name)
            adoption.leave(name, reason)
        return
    _write_rows(adoption, "evaluation.data", "eval_dataset", "evaluation.data.source")
    adoption.carry("evaluation.data.shuffle", value=False)
    steps, parts = adoption.value("eval_steps"), adoption.fields.get("algorithm.num_mini_batches")
    if strategy == "steps" and isinstance(steps, int) and parts is not None and steps % parts.value == 0:
        adoption.carry("evaluation.interval", steps // parts.value, "eval_steps")
    else:
        adoption.leave_open("evaluation.interval", f"iterations between two evaluations; eval_steps {steps}")
    count = adoption.value("num_generations_eval") or adoption.value("num_generations", 8)
    adoption.carry("evaluation.num_generations", count, "num_generations_eval", "num_generations")
    for name in ("temperature", "top_p"):
        if adoption.has(name):
            adoption.carry(f"evaluation.sampling.{name}", adoption.value(name), name)
            adoption.carry(f"sampling.{name}", adoption.value(name), name)
    for name in ("max_completion_length", "top_k"):
        if (known := adoption.fields.get(f"sampling.{name}")) is not None:
            adoption.carry(f"evaluation.sampling.{name}", known.value, name)
        elif (open_ := adoption.open.get(f"sampling.{name}")) is not None:
            adoption.leave_open(f"evaluation.sampling.{name}", open_)
    adoption.ignore("eval_strategy", "eval_steps")
    adoption.leave("per_device_eval_batch_size", _EVALUATION)


def model(adoption: Adoption) -> None:
    """The policy and its revision."""
    given = adoption.value("model_init_kwargs")
    revision: Any = adoption.value("model_revision")
    if isinstance(given, Mapping):
        revision = given.get("revision", revision)
        if others := [name for name in given if name != "revision"]:
            adoption.leave("model_init_kwargs", f"{', '.join(map(str, others))}: Gleaner loads the policy itself")
        adoption.ignore("model_init_kwargs")
    if revision is not None and revision != "main":
        adoption.carry("policy.revision", revision, *_OF_MODEL)
    elif not adoption.is_known("model_revision"):
        adoption.carry("policy.revision", None, "model_revision")
    adoption.ignore("model_revision")


def rows(adoption: Adoption) -> None:
    """The script's data set, or that of the command line."""
    if adoption.has("train_dataset") or not adoption.is_known("train_dataset"):
        _write_rows(adoption, "data", "train_dataset", "data.source")
        adoption.ignore("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    elif adoption.has("dataset_name"):
        adoption.carry("data.source", adoption.value("dataset_name"), "dataset_name")
        if adoption.value("dataset_config") is not None:
            adoption.carry("data.subset", adoption.value("dataset_config"), "dataset_config")
        adoption.carry("data.split", adoption.value("dataset_train_split", "train"), "dataset_train_split")
    adoption.ignore("dataset_test_split", "dataset_streaming")


def _write_rows(adoption: Adoption, section: str, name: str, source: str) -> None:
    named = adoption.value(name)
    if not isinstance(named, Mapping):
        adoption.carry(source, None, name)
        return
    for field, value in named.items():
        adoption.carry(f"{section}.{field}", value, name)


def _rewards(adoption: Adoption) -> None:
    """The functions with their weights."""
    named, given = adoption.value("reward_model_name_or_path"), adoption.value("reward_funcs")
    functions = [{"function": "reward_model", "model": named}] if named else []
    functions += given if isinstance(given, list) else [] if given is None else [given]
    adoption.ignore("reward_model_name_or_path")
    unnamed = [name for name in adoption.given if name.startswith("reward_funcs[")]
    for name in unnamed:
        adoption.leave(name, str(adoption.value(name)))
    if not functions or not adoption.is_known("reward_funcs"):
        if not adoption.is_known("reward_funcs"):
            adoption.carry("rewards", None, "reward_funcs")
        adoption.leave("reward_weights", "each of `rewards` has its `weight`")
        return
    made = [_ours(each) for each in functions]
    for index, (each, weight) in enumerate(zip(made, _weights(adoption, len(made)), strict=True)):
        if not isinstance(each, dict):
            adoption.leave_open(f"rewards.{index}", "a function of a module, as in {function: my_module:my_function}")
            continue
        if weight is not None:
            each["weight"] = weight
        if weight == UNFILLED:
            adoption.leave_open(f"rewards.{index}.weight", "reward_weights is no list with one for each function")
        if each["function"].startswith(_TRLS_OWN):
            adoption.doubt(each["function"], "TRL must be installed where rewards are computed")
    adoption.carry("rewards", made, "reward_funcs", "reward_model_name_or_path", "reward_weights")


def _weights(adoption: Adoption, count: int) -> list[Any]:
    """A weight for each function; None without weights, and the mark of an open field for unknown weights."""
    given = adoption.value("reward_weights")
    adoption.ignore("reward_weights")
    if given is None and adoption.is_known("reward_weights"):
        return [None] * count
    return given if isinstance(given, list) and len(given) == count else [UNFILLED] * count


def _ours(function: Any) -> Any:
    """A reward of Gleaner; the mark of an open field for a value without a function's name."""
    if not isinstance(function, dict) or "function" not in function:
        return UNFILLED
    if function == {"function": f"{_TRLS_OWN}think_format_reward"}:
        return {"function": "format", "name": "think_format_reward", "arguments": {"pattern": _THINK_FORMAT}}
    return dict(function)


def tools(adoption: Adoption) -> None:
    """Functions and a class that the policy calls. TRL sets no limit on the calls by default."""
    asked = [name for name in ("tools", "environment_factory") if adoption.has(name) or not adoption.is_known(name)]
    if adoption.has("tools") and not adoption.value("tools"):
        asked.remove("tools")
        adoption.ignore("tools")
    for name, field in (("tools", "turns.tools"), ("environment_factory", "turns.environment")):
        if name in asked:
            adoption.carry(field, adoption.value(name), name)
    limit = "max_tool_calling_iterations"
    if asked and (adoption.value(limit) is not None or not adoption.is_known(limit)):
        # The calls of the last turn are not made here.
        adoption.carry("turns.turns_max", adoption.count(limit, 0) + 1, limit)
    elif asked:
        adoption.carry("turns.turns_max", _TURNS_MAX)
    adoption.leave(limit, "it has no effect without tools")
    reason = "Gleaner generates itself; a program that asks the policy for its turns is an agent, turns.agent"
    adoption.refuse("rollout_func", reason, "turns.agent")
