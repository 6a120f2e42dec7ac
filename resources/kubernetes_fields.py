"""Fields of a pod in the words of Kubernetes, checked as its API server checks them.

Each checker raises ValueError whose message begins with the path of the wrong field. The rules are those that
kube-apiserver 1.34.1 applied to pods in dry runs with strict field validation; null stands for a field left out. What
is not listed here a pool does not take: it belongs into a PodTemplate of the cluster, which a pool can name.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resources.labels import check_label, check_label_value

Checker = Callable[[str, Any], None]

_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[ -<>-~]+")
_SUBDOMAIN_CHARACTERS_MAX = 253


def refuse(path: str, value: object, allowed: str) -> ValueError:
    """The error about a field: its path, its value, and what is allowed."""
    shown = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return ValueError(f"{path}: value {shown}; allowed: {allowed}")


def check_subdomain(path: str, value: str) -> None:
    """Raise ValueError unless `value` can be the name of a Kubernetes object."""
    if not _SUBDOMAIN.fullmatch(value) or len(value) > _SUBDOMAIN_CHARACTERS_MAX:
        raise refuse(
            path,
            value,
            f"up to {_SUBDOMAIN_CHARACTERS_MAX} small letters, digits, '-' and '.', with a letter or digit at the "
            "beginning and the end and beside each '.'",
        )


def check_tolerations(path: str, tolerations: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless a pod can have these tolerations."""
    fields = {
        "key": _text,
        "operator": _one_of("Exists", "Equal", ""),
        "value": _text,
        "effect": _one_of("NoSchedule", "PreferNoSchedule", "NoExecute", ""),
        "tolerationSeconds": _integer,
    }
    for index, toleration in enumerate(tolerations):
        place = f"{path}.{index}"
        _mapping(fields)(place, toleration)
        key, operator, value = (toleration.get(name) or "" for name in ("key", "operator", "value"))
        if key:
            check_label(f"{place}.key", key)
        elif operator != "Exists":
            raise refuse(f"{place}.operator", operator or None, "'Exists', because there is no key")
        if operator == "Exists" and value:
            raise refuse(f"{place}.value", value, "nothing, because operator 'Exists' looks at the key only")
        check_label_value(f"{place}.value", value)
        if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
            seconds = toleration["tolerationSeconds"]
            raise refuse(f"{place}.tolerationSeconds", seconds, "nothing, because only effect 'NoExecute' evicts")


def check_env(path: str, env: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless a container can have these variables; a value may be that of a Secret or ConfigMap."""
    reference = _mapping({"name": _text, "key": _text, "optional": _boolean}, required=("name", "key"))
    sources = _mapping({"secretKeyRef": reference, "configMapKeyRef": reference})
    variable = _mapping({"name": _text, "value": _text, "valueFrom": sources}, required=("name",))
    for index, each in enumerate(env):
        place = f"{path}.{index}"
        variable(place, each)
        check_variable(f"{place}.name", each["name"])
        if each.get("valueFrom") is None:
            continue
        if each.get("value"):
            raise refuse(f"{place}.valueFrom", each["valueFrom"], "nothing beside a value")
        source = _only_one(f"{place}.valueFrom", each["valueFrom"])
        selected = each["valueFrom"][source]
        check_subdomain(f"{place}.valueFrom.{source}.name", selected["name"])
        if not _CONFIG_KEY.fullmatch(selected["key"]):
            allowed = "up to 253 letters, digits and -_."
            raise refuse(f"{place}.valueFrom.{source}.key", selected["key"], allowed)


def check_variable(path: str, name: str) -> None:
    """Raise ValueError unless a container can have an environment variable of this name."""
    if not _VARIABLE.fullmatch(name):
        raise refuse(path, name, "printable ASCII characters other than '='")


def check_secrets(path: str, secrets: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless Flyte can be asked for these secrets, each in an environment variable."""
    secret = _mapping({"group": _text, "key": _text, "env_var": _text}, required=("group", "key", "env_var"))
    for index, each in enumerate(secrets):
        secret(f"{path}.{index}", each)
        for name in ("group", "key"):
            if not each[name].isprintable() or not each[name].isascii():
                raise refuse(f"{path}.{index}.{name}", each[name], "printable ASCII characters")
        check_variable(f"{path}.{index}.env_var", each["env_var"])


def _only_one(path: str, sources: Mapping[str, Any]) -> str:
    given = [source for source, what in sources.items() if what is not None]
    if len(given) != 1:
        raise refuse(path, given, "exactly one source")
    return given[0]


def _text(path: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise refuse(path, value, "text, in quotes if it looks like a number")


def _integer(path: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise refuse(path, value, "an integer")


def _boolean(path: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise refuse(path, value, "true or false")


def _one_of(*names: str) -> Checker:
    def check(path: str, value: Any) -> None:
        if value is not None and value not in names:
            raise refuse(path, value, ", ".join(name for name in names if name))

    return check


def _mapping(fields: Mapping[str, Checker], required: Sequence[str] = ()) -> Checker:
    """Checks a mapping with the given fields and no further fields; a required field is not empty."""

    def check(path: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise refuse(path, value, f"a mapping of {', '.join(fields)}")
        for name, inner in value.items():
            if name not in fields:
                raise ValueError(f"{path}.{name}: unknown field; allowed: {', '.join(fields)}")
            fields[name](f"{path}.{name}", inner)
        for name in required:
            if value.get(name) in (None, ""):
                raise ValueError(f"{path}.{name}: missing or empty; it has no default")

    return check
