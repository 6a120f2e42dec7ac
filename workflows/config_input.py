"""The type of a workflow's configuration: a mapping that is checked where it is given, and has a form in the console.

`pyflyte run` reads the file on its own machine, so a wrong field is one line before anything runs. What is handed over
is the mapping as it was given, and the pods read it as strictly.
"""

import json
from collections.abc import Mapping
from typing import Any

from click import BadParameter
from flyteidl.core import types_pb2
from flytekit.core.context_manager import FlyteContext
from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.models.literals import Literal
from flytekit.models.types import LiteralType, SimpleType

from tasks.configuration.form import form
from tasks.configuration.overrides import document_with, overridden
from tasks.configuration.run_config import ConfigError, parse
from workflows.uploads import take_along, whole_uploads

SOURCE = "--config"
_FORM = "#/definitions/RunConfig"


class Configuration(dict[str, Any]):
    """A run's configuration, for Flyte a Struct as any mapping is."""

    @classmethod
    def from_json(cls, text: str) -> "Configuration":
        """What `pyflyte run` has read for `--config`; raises BadParameter, which `pyflyte` prints without a traceback.

        text: a mapping, or a list of a file or mapping and overrides FIELD=VALUE, as JSON.
        """
        given = json.loads(text)
        try:
            document = _with_overrides(given) if isinstance(given, list) else given
            take_along(parse(document, SOURCE))
        except ConfigError as error:
            raise BadParameter(str(error)) from None
        return cls(document)


def _with_overrides(given: list[Any]) -> Any:
    match given:
        case [str() as file, *overrides] if all(isinstance(each, str) for each in overrides):
            return document_with(file, overrides)
        case [Mapping() as document, *overrides] if all(isinstance(each, str) for each in overrides):
            try:
                return overridden(document, overrides)
            except ValueError as error:
                raise ConfigError(SOURCE, [str(error)]) from None
    raise ConfigError(SOURCE, ['it is a list; allowed: a mapping, or ["my.yaml", "optimizer.learning_rate=1e-6", ...]'])


class _WithForm(LiteralType):  # type: ignore[misc]  # flytekit has no types for it
    """A Struct with the form as its metadata where it is registered; `pyflyte run --help` would print all of it."""

    def to_flyte_idl(self) -> types_pb2.LiteralType:
        # The console makes a form of what has exactly one definition.
        metadata = {"$ref": _FORM, "definitions": {"RunConfig": form()}}
        return LiteralType(simple=self.simple, metadata=metadata).to_flyte_idl()


class _ConfigurationTransformer(TypeTransformer[Configuration]):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("configuration", Configuration, enable_type_assertions=False)

    def get_literal_type(self, _: type[Configuration]) -> LiteralType:
        return _WithForm(simple=SimpleType.STRUCT)

    def to_literal(self, context: FlyteContext, value: Any, _: type[Configuration], _expected: LiteralType) -> Literal:
        return TypeEngine.to_literal(context, dict(value), dict, TypeEngine.to_literal_type(dict))

    def to_python_value(self, context: FlyteContext, literal: Literal, _: type[Configuration]) -> Configuration:
        return Configuration(TypeEngine.to_python_value(context, literal, dict))

    def guess_python_type(self, literal_type: LiteralType) -> type[Configuration]:
        if (literal_type.metadata or {}).get("$ref") == _FORM:
            return Configuration
        raise ValueError("not a configuration")


TypeEngine.register(_ConfigurationTransformer())
whole_uploads()
