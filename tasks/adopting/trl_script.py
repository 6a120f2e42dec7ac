"""Reads the settings of a TRL script with ast: it is parsed and never executed.

It finds the one call of GRPOConfig, the model that GRPOTrainer gets as text, and PEFT's LoraConfig.
"""

import ast
import warnings
from collections.abc import Iterator, Mapping

from tasks.adopting.adoption import NotAdopted, Setting, shown

# What of the other calls is read, and the name that it has as a script argument of TRL.
_TRAINER = {"model": "model_name_or_path"}
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}


def read_script(text: str) -> list[Setting]:
    """The settings of a script, in its order; raises NotAdopted."""
    tree = _parsed(text)
    configs = _calls(tree, "GRPOConfig")
    if not configs:
        raise NotAdopted("it has no call of GRPOConfig; allowed: a Python script with exactly one")
    if len(configs) > 1:
        lines = ", ".join(str(call.lineno) for call in configs)
        raise NotAdopted(f"it has {len(configs)} calls of GRPOConfig, on lines {lines}; allowed: exactly one")
    found = list(_settings(configs[0]))
    for name, kept in (("GRPOTrainer", _TRAINER), ("LoraConfig", _LORA)):
        calls = _calls(tree, name)
        found += _renamed(calls[0], kept) if len(calls) == 1 else _several(calls, name)
    return sorted(found, key=lambda each: each.line)


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise NotAdopted(f"it is no Python: line {error.lineno or 1}: {error.msg}") from None
    except ValueError as error:
        raise NotAdopted(f"it is no Python: {error}") from None
    except (RecursionError, MemoryError):
        raise NotAdopted("it is no Python that can be read: it is nested too deeply") from None


def _calls(tree: ast.Module, name: str) -> list[ast.Call]:
    """The calls of a class, by its name or by the one that an import gives it, in the order of their lines."""
    known = {name}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {alias.asname for alias in node.names if alias.name == name and alias.asname}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func) in known]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _called(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _settings(call: ast.Call) -> Iterator[Setting]:
    for index, argument in enumerate(call.args):
        # The first field of transformers' TrainingArguments.
        yield _setting("output_dir" if index == 0 else f"argument {index + 1} by position", argument)
    for keyword in call.keywords:
        if keyword.arg is None:
            yield Setting(line=keyword.value.lineno, name="**", text=_source(keyword.value))
        else:
            yield _setting(keyword.arg, keyword.value)


def _renamed(call: ast.Call, kept: Mapping[str, str]) -> Iterator[Setting]:
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg in kept:
            yield _setting(kept[keyword.arg], keyword.value)


def _several(calls: list[ast.Call], name: str) -> list[Setting]:
    return [Setting(line=call.lineno, name=name, text=f"one of {len(calls)} calls") for call in calls]


def _setting(name: str, node: ast.expr) -> Setting:
    try:
        return Setting(line=node.lineno, name=name, value=ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Setting(line=node.lineno, name=name, text=_source(node))


def _source(node: ast.expr) -> str:
    try:
        return shown(ast.unparse(node))
    except RecursionError:
        return "what is nested too deeply"
