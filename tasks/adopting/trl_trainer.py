"""Reads a script's arguments of a configuration, its trainer and LoraConfig, each as a setting with its line."""

import ast
from collections.abc import Callable, Iterator
from typing import Any

from tasks.adopting.adoption import Setting
from tasks.adopting.script_functions import ScriptFunctions
from tasks.adopting.script_rows import rows_of
from tasks.adopting.script_values import NoLiteral, ScriptValues, called, source
from tasks.configuration.problems import UNFILLED

_OF_EXAMPLES = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
# In the order of each trainer's arguments, as far as all releases agree.
_POSITIONS = {
    "GRPOTrainer": (
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "reward_processing_classes",
        "callbacks",
        "optimizers",
    ),
    "SFTTrainer": ("model", *_OF_EXAMPLES),
    "DPOTrainer": ("model", "ref_model", *_OF_EXAMPLES),
    "GKDTrainer": ("model", "teacher_model", *_OF_EXAMPLES),
    "DistillationTrainer": (
        "model",
        "teacher_model",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "callbacks",
        "optimizers",
    ),
}
# PEFT's fields that TRL's command line has, too, under these names.
_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
# What TRL's own scripts make of the command line, which is read itself.
_FROM_WORDS = {"get_peft_config", "get_quantization_config"}


def setting(values: ScriptValues, name: str, node: ast.expr, line: int | None = None) -> Setting:
    """The setting of an expression; without a value if the expression is no literal."""
    line = node.lineno if line is None else line
    try:
        return Setting(line=line, name=name, value=values.value(node))
    except NoLiteral as error:
        return Setting(line=line, name=name, unknown=str(error))


def settings_of_call(values: ScriptValues, call: ast.Call) -> Iterator[Setting]:
    """The arguments of GRPOConfig. The first by position is the first field of transformers' TrainingArguments."""
    for index, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            yield Setting(line=argument.lineno, name="*", unknown=f"{source(argument.value)} is no literal")
        else:
            yield setting(values, "output_dir" if index == 0 else f"argument {index + 1} by position", argument)
    for keyword in call.keywords:
        if keyword.arg in ("model_init_kwargs", "teacher_model_init_kwargs"):
            yield _model_arguments(values, keyword.arg, keyword.value)
            continue
        if keyword.arg is not None:
            yield setting(values, keyword.arg, keyword.value)
            continue
        found = setting(values, "**", keyword.value)
        if isinstance(found.value, dict):
            yield from (Setting(line=found.line, name=str(name), value=each) for name, each in found.value.items())
        else:
            yield Setting(line=found.line, name="**", unknown=found.unknown or "it is no mapping")


def _model_arguments(values: ScriptValues, argument: str, node: ast.expr) -> Setting:
    """The mapping of an argument such as model_init_kwargs.

    Only the revision must be a literal, and further values may be source text.
    """
    found = values.resolved(node)
    pairs: list[tuple[object, ast.expr]] = []
    if isinstance(found, ast.Call) and called(found.func) == "dict" and not found.args:
        pairs = [(keyword.arg, keyword.value) for keyword in found.keywords]
    elif isinstance(found, ast.Dict):
        pairs = [
            (key.value if isinstance(key, ast.Constant) else None, value)
            for key, value in zip(found.keys, found.values, strict=True)
        ]
    made: dict[str, object] = {}
    for name, value in pairs:
        each = setting(values, argument, value)
        if not isinstance(name, str) or (name == "revision" and each.unknown is not None):
            return Setting(line=node.lineno, name=argument, unknown=f"{source(found)} is no literal")
        made[name] = source(value) if each.unknown is not None else each.value
    is_read = bool(pairs) or isinstance(found, ast.Dict)
    return Setting(line=node.lineno, name=argument, value=made) if is_read else setting(values, argument, node)


def lora_name(name: str) -> str:
    """The name of a field of LoraConfig as a setting."""
    return _LORA.get(name, f"LoraConfig.{name}")


def lora_settings(values: ScriptValues, call: ast.Call) -> Iterator[Setting]:
    """The arguments of LoraConfig."""
    yield Setting(line=call.lineno, name="peft_config", value="LoraConfig")
    for found in settings_of_call(values, call):
        name = found.name if found.name.startswith("*") else lora_name(found.name)
        if found.name == "task_type" and found.unknown and found.unknown.startswith("TaskType.CAUSAL_LM "):
            continue
        if name.startswith("*"):
            yield Setting(line=found.line, name="peft_config", unknown=found.unknown or "it is no literal")
        else:
            yield Setting(line=found.line, name=name, value=found.value, unknown=found.unknown)


def trainer_settings(
    values: ScriptValues, functions: ScriptFunctions, call: ast.Call, *, trainer: str, is_parsed: bool
) -> Iterator[Setting]:
    """The arguments of a trainer, by its name. is_parsed: the command line is read into its configuration."""
    positions = _POSITIONS[trainer]
    given: dict[str, ast.expr] = {}
    for index, argument in enumerate(call.args):
        if index < len(positions) and not isinstance(argument, ast.Starred):
            given[positions[index]] = argument
        else:
            yield Setting(line=argument.lineno, name=f"argument {index + 1} of {trainer}", value=source(argument))
    for keyword in call.keywords:
        if keyword.arg is None:
            for name in ("model_name_or_path", "reward_funcs", "train_dataset", "peft_config"):
                text = f"{source(keyword.value)} may hold {name}"
                yield Setting(line=keyword.value.lineno, name=name, unknown=text)
        else:
            given[keyword.arg] = keyword.value
    for name, node in given.items():
        if name == "args" or (isinstance(node, ast.Constant) and node.value is None):
            continue
        if is_parsed and isinstance(node, ast.Call) and called(node.func) in _FROM_WORDS:
            continue
        yield from _argument(values, functions, name, node, given)


def _argument(
    values: ScriptValues, functions: ScriptFunctions, name: str, node: ast.expr, given: dict[str, ast.expr]
) -> Iterator[Setting]:
    if name in ("model", "teacher_model"):
        yield from _model(values, node, name.removesuffix("model"))
    elif name == "reward_funcs":
        yield from _rewards(values, functions, node)
    elif name == "peft_config":
        found = values.resolved(node)
        if isinstance(found, ast.Call) and called(found.func) == "LoraConfig":
            yield from lora_settings(values, found)
        elif not (isinstance(found, ast.Constant) and found.value is None):
            yield Setting(line=node.lineno, name=name, unknown=f"{source(node)} is no LoraConfig of the script")
    elif (read := _READ.get(name)) is not None:
        try:
            yield Setting(line=node.lineno, name=name, value=read(values, functions, node))
        except NoLiteral as error:
            yield Setting(line=node.lineno, name=name, unknown=str(error))
    elif name != "processing_class" or not _is_models_own(values, node, given.get("model")):
        yield Setting(line=node.lineno, name=name, value=source(node))


def _model(values: ScriptValues, node: ast.expr, whose: str) -> Iterator[Setting]:
    """A path or id, or the arguments of from_pretrained; whose: what the settings' names begin with."""
    path, revision = f"{whose}model_name_or_path", f"{whose}model_revision"
    found = values.resolved(node)
    if not isinstance(found, ast.Call) or called(found.func) != "from_pretrained":
        yield setting(values, path, node)
        return
    for index, argument in enumerate(found.args):
        yield setting(values, path if index == 0 else f"argument {index + 1} of the {whose}model", argument)
    for keyword in found.keywords:
        name = keyword.arg or "**"
        known = {"pretrained_model_name_or_path": path, "revision": revision}
        each = setting(values, known.get(name, f"{whose}from_pretrained.{name}"), keyword.value)
        # A dtype is no literal, but says what it is.
        is_told = each.unknown is not None and each.name not in known.values()
        yield Setting(line=each.line, name=each.name, value=source(keyword.value)) if is_told else each


def _is_models_own(values: ScriptValues, node: ast.expr, model: ast.expr | None) -> bool:
    """True for the model's own tokenizer without a chat template of the script's."""
    tokenizer = values.resolved(node)
    if not isinstance(tokenizer, ast.Call) or called(tokenizer.func) != "from_pretrained" or model is None:
        return False
    changed = any(
        change.name == "chat_template" and isinstance(change.base, ast.Name) and isinstance(node, ast.Name)
        for change in values.names.changes
        if isinstance(change.base, ast.Name) and isinstance(node, ast.Name) and change.base.id == node.id
    )
    loaded = values.resolved(model)
    named = loaded.args[0] if isinstance(loaded, ast.Call) and loaded.args else model
    try:
        return not changed and bool(tokenizer.args) and values.value(tokenizer.args[0]) == values.value(named)
    except NoLiteral:
        return False


def _rewards(values: ScriptValues, functions: ScriptFunctions, node: ast.expr) -> Iterator[Setting]:
    """The reward functions as items of `rewards`; the item of a function without a name is left open."""
    found = values.resolved(node)
    nodes = found.elts if isinstance(found, ast.List | ast.Tuple) else [node]
    made: list[Any] = []
    for each in nodes:
        try:
            made.append(_reward(values, functions, each))
        except NoLiteral as error:
            made.append(UNFILLED)
            yield Setting(line=each.lineno, name=f"reward_funcs[{len(made) - 1}]", value=str(error))
    if made.count(UNFILLED) == len(made):
        yield Setting(line=node.lineno, name="reward_funcs", unknown=f"{source(node)} names no functions of a module")
        return
    yield Setting(line=node.lineno, name="reward_funcs", value=made)
    if functions.uses_script and (line := functions.runs_when_imported) is not None:
        yield Setting(line=line, name="the script itself", value="runs")


def _reward(values: ScriptValues, functions: ScriptFunctions, node: ast.expr) -> dict[str, Any]:
    try:
        named = values.value(node)
    except NoLiteral:
        return functions.made(node)
    if isinstance(named, str) and named:
        return {"function": "reward_model", "model": named}
    raise NoLiteral(f"{source(node)} is no reward function")


def _tools(values: ScriptValues, functions: ScriptFunctions, node: ast.expr) -> list[str]:
    found = values.resolved(node)
    if not isinstance(found, ast.List | ast.Tuple):
        raise NoLiteral(f"{source(node)} is no list of functions")
    return [functions.spec(each) for each in found.elts]


_READ: dict[str, Callable[[ScriptValues, ScriptFunctions, ast.expr], Any]] = {
    "train_dataset": lambda values, _functions, node: rows_of(values, node).fields,
    "eval_dataset": lambda values, _functions, node: rows_of(values, node).fields,
    "tools": _tools,
    "environment_factory": lambda _values, functions, node: functions.spec(node),
}
