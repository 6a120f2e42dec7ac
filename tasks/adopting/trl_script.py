"""Reads the settings of a TRL script, which is parsed and never executed.

The settings come from the single configuration of a trainer, such as GRPOConfig, later changes of it, the arguments of
its trainer, and PEFT's LoraConfig. For a script that reads its command line, the words of the command line count.
"""

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.adopting.adoption import NotAdopted, Setting
from tasks.adopting.script_functions import ScriptFunctions
from tasks.adopting.script_names import Change, Scope, ScriptNames
from tasks.adopting.script_values import ScriptValues, called, is_parsing, source
from tasks.adopting.trl_defaults import ALL, OF_TRAINERS
from tasks.adopting.trl_trainer import lora_name, lora_settings, setting, settings_of_call, trainer_settings
from tasks.adopting.trl_words import read_document, read_words

_FILES_OF_WORDS = (".yaml", ".yml")
# The name of the setting with the trainer of a script that does not use GRPO, and these trainers by TRL's names.
TRAINER = "trainer"
_TRAINERS = {"SFT": "sft", "DPO": "dpo", "GKD": "gkd", "Distillation": "distillation"}
_NO_CONFIG = (
    "it has no call of GRPOConfig; allowed: a Python script with exactly one, or one of SFTConfig, DPOConfig, "
    "GKDConfig or DistillationConfig"
)
_NO_WORDS = (
    "it reads its settings from the command line; allowed: with them behind the file, as in "
    "`--learning_rate 1e-6` or `--config grpo.yaml`"
)
# What TRL's own script for its command `trl grpo` defines, and what it changes itself.
_OWN = ({"GRPOScriptArguments"}, {"main", "make_parser"}, {"model_init_kwargs"})
_MAKING_ROWS = frozenset({"map", "filter", "select", "shuffle", "train_test_split", "take"})


def read(text: str, path: Path, words: Sequence[str]) -> list[Setting]:
    """The settings of a script and of its command line, or of a YAML file for `trl grpo --config`; raises NotAdopted.

    Of several settings with an equal name, the last counts.
    """
    if path.suffix in _FILES_OF_WORDS:
        return read_words(words, read_document(text))
    return list(_Script(_parsed(text), path, words).settings())


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


class _Script:
    """A parsed script with the words of its command line."""

    def __init__(self, tree: ast.Module, path: Path, words: Sequence[str]) -> None:
        self._tree = tree
        self._names = ScriptNames(tree)
        self._reads_words = any(is_parsing(node) for node in ast.walk(tree))
        if words and not self._reads_words:
            raise NotAdopted(f"it reads no command line; allowed behind it: nothing, not {words[0]!r}")
        self._words = read_words(words)
        trainer = self._used()
        self._kind = _TRAINERS.get(trainer)
        self._trainers_own = [Setting(line=None, name=TRAINER, value=self._kind)] if self._kind else []
        self._config, self._trainer = f"{trainer}Config", f"{trainer}Trainer"
        self._configs = self._calls(self._config)
        if len(self._configs) > 1:
            lines = ", ".join(str(call.lineno) for call in self._configs)
            raise NotAdopted(
                f"it has {len(self._configs)} calls of {self._config}, on lines {lines}; allowed: exactly one"
            )
        # TrlParser and HfArgumentParser make the configuration themselves.
        self._is_parsed = not self._configs and self._reads_words and self._config in self._loaded_names()
        given = {each.name: each.value for each in self._words if each.unknown is None}
        defaults = ALL | (OF_TRAINERS[self._kind] if self._kind else {})
        self._defaults = defaults
        self._values = ScriptValues(self._names, defaults | given if self._is_parsed else given)
        self._functions = ScriptFunctions(self._values, path)

    def _used(self) -> str:
        """Which of TRL's trainers the script uses: GRPO's if there are several, or none that is known."""
        loaded = self._loaded_names()
        used = [
            name
            for name in ("GRPO", *_TRAINERS)
            if any(self._calls(f"{name}{part}") or f"{name}{part}" in loaded for part in ("Config", "Trainer"))
        ]
        if len(used) > 1 and used[0] != "GRPO":
            raise NotAdopted(f"it uses {' and '.join(f'{name}Trainer' for name in used)}; allowed: one of them")
        return used[0] if used else "GRPO"

    def settings(self) -> Iterator[Setting]:
        trainers = self._calls(self._trainer)
        if not self._configs and not self._is_parsed and not trainers:
            raise NotAdopted(_NO_CONFIG)
        if self._is_parsed and not self._words:
            raise NotAdopted(_NO_WORDS)
        yield from self._trainers_own
        if self._is_parsed:
            yield from self._words
        yield from self._subclasses()
        for call in self._configs:
            yield from settings_of_call(self._values, call)
        # Of what stands in a function above, it is not known when it runs.
        yield from self._changes()
        if self._is_parsed and self._is_trls_own():
            return
        if len(trainers) > 1:
            text = f"it has {len(trainers)} calls of {self._trainer}; allowed: one"
            yield from (
                Setting(line=trainers[-1].lineno, name=name, unknown=text)
                for name in ("model_name_or_path", "reward_funcs")
            )
        for call in trainers if len(trainers) == 1 else ():
            yield from trainer_settings(
                self._values, self._functions, call, trainer=self._trainer, is_parsed=self._is_parsed
            )
        yield from self._adapters(trainers)
        for change in self._names.changes:
            bound = self._followed(change.base) if isinstance(change.base, ast.Name) else None
            if isinstance(bound, ast.Call) and called(bound.func) == "LoraConfig":
                yield self._changed(change, lora_name(change.name))

    def _adapters(self, trainers: Sequence[ast.Call]) -> Iterator[Setting]:
        """The LoraConfig of a script whose trainer has no peft_config: the model may have the adapters already."""
        keywords = {keyword.arg for call in trainers for keyword in call.keywords}
        calls = self._calls("LoraConfig")
        if "peft_config" in keywords or not calls:
            return
        if len(calls) > 1:
            text = f"it has {len(calls)} calls of LoraConfig; allowed: one"
            yield Setting(line=calls[-1].lineno, name="peft_config", unknown=text)
        elif trainers and not self._calls("get_peft_model") and not self._calls("add_adapter"):
            yield Setting(line=calls[0].lineno, name="LoraConfig", value="LoraConfig(...)")
        else:
            yield from lora_settings(self._values, calls[0])

    def _subclasses(self) -> Iterator[Setting]:
        """Fields set by subclasses of the configuration, and a setting for each subclass with methods."""
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {called(base) for base in node.bases}
            if self._config in bases:
                for statement in node.body:
                    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement
                    target = target.target if isinstance(target, ast.AnnAssign) else target
                    value = getattr(statement, "value", None)
                    if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                        yield setting(self._values, target.id, value)
            if bases & {self._config, self._trainer} and any(isinstance(each, ast.FunctionDef) for each in node.body):
                yield Setting(line=node.lineno, name=f"class {node.name}", value=node.name)

    def _changes(self) -> Iterator[Setting]:
        """Settings that the script assigns to the configuration after its construction."""
        for change in self._names.changes:
            whole = self._is_config(change.base)
            scope = self._names.scope_of(change.base)
            is_ours = change.name in self._defaults or change.name in {each.name for each in self._words}
            if whole is None or (whole is False and not is_ours):
                continue
            if not whole or _in_class(scope):
                yield self._changed(replace(change, is_certain=False), change.name)
            elif not (self._is_parsed and self._is_trls_own() and change.name in _OWN[2]):
                yield self._changed(change, change.name)
        for call in self._calls("replace"):
            if call.args and self._is_config(call.args[0]):
                text = f"{source(call)} may set anything"
                yield Setting(line=call.lineno, name="**", unknown=text)

    def _changed(self, change: Change, name: str) -> Setting:
        """A later assignment as a setting; the value is known only if every run of the script makes the assignment."""
        if not change.is_certain or change.value is None:
            text = f"{source(change.base)}.{change.name} is set where it may or may not count"
            return Setting(line=change.line, name=name, unknown=text)
        return setting(self._values, name, change.value, line=change.line)

    def _is_config(self, node: ast.expr) -> bool | None:
        """True for the configuration, False for a possible one such as a function's parameter, None otherwise."""
        if isinstance(node, ast.Attribute):
            return True if node.attr == "args" else None
        if not isinstance(node, ast.Name):
            return None
        found = self._names.found(node)
        bound = [] if found is None else [self._followed(each.value) for each in found[1]]
        if any(each in self._configs for each in bound if each is not None):
            return True
        if self._is_parsed and self._values.holds_arguments(node):
            return True
        return False if self._values.holds_arguments(node) and not self._reads_words else None

    def _followed(self, node: ast.AST | None) -> ast.AST | None:
        return self._values.resolved(node) if isinstance(node, ast.expr) else node

    def _calls(self, name: str) -> list[ast.Call]:
        """The calls of a function or class, by every imported name, and the calls of derived classes."""
        known = {name}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom):
                known |= {alias.asname for alias in node.names if alias.name == name and alias.asname}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef) and known & {called(base) for base in node.bases}:
                known.add(node.name)
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call) and called(node.func) in known]
        return sorted(calls, key=lambda call: (call.lineno, call.col_offset))

    def _loaded_names(self) -> set[str]:
        return {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}

    def _is_trls_own(self) -> bool:
        """True for TRL's own script, whose settings are the words of the command line and nothing more."""
        classes = {node.name for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)}
        functions = {node.name for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef)}
        methods = {node.attr for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        return classes == _OWN[0] and functions == _OWN[1] and not methods & _MAKING_ROWS


def _in_class(scope: Scope | None) -> bool:
    while scope is not None:
        if isinstance(scope.node, ast.ClassDef):
            return True
        scope = scope.parent
    return False
