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
from resources.quantities import amount

Checker = Callable[[str, Any], None]

_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[ -<>-~]+")
_SUBDOMAIN_CHARACTERS_MAX = 253
_ANNOTATIONS_BYTES_MAX = 262_144
_MODE_MAX = 0o777
_WEIGHT_MAX = 100
_HOST_PATH_TYPES = (
    "",
    "BlockDevice",
    "CharDevice",
    "Directory",
    "DirectoryOrCreate",
    "File",
    "FileOrCreate",
    "Socket",
)


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


def check_annotations(path: str, annotations: Mapping[str, str | None]) -> None:
    """Raise ValueError unless a pod can have these annotations: names as of labels, any text, 256 KiB together."""
    for name in annotations:
        # The server checks the name in small letters, so its prefix may have capitals.
        check_label(path, name.lower())
    size = sum(len(name.encode()) + len((text or "").encode()) for name, text in annotations.items())
    if size > _ANNOTATIONS_BYTES_MAX:
        raise ValueError(f"{path}: {size} bytes given; allowed: {_ANNOTATIONS_BYTES_MAX} in names and values together")


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


def check_affinity(path: str, affinity: Mapping[str, Any]) -> None:
    """Raise ValueError unless a pod can have this affinity to nodes."""
    term = _mapping({"matchExpressions": _list_of(_check_requirement)})
    _mapping(
        {
            "nodeAffinity": _mapping(
                {
                    "requiredDuringSchedulingIgnoredDuringExecution": _mapping(
                        {"nodeSelectorTerms": _list_of(term, at_least_one=True)}, required=("nodeSelectorTerms",)
                    ),
                    "preferredDuringSchedulingIgnoredDuringExecution": _list_of(
                        _mapping({"weight": _between(1, _WEIGHT_MAX), "preference": term}, required=("weight",))
                    ),
                }
            )
        }
    )(path, affinity)


def _check_requirement(path: str, requirement: Any) -> None:
    operators = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
    fields = {"key": _text, "operator": _one_of(*operators), "values": _list_of(_text)}
    _mapping(fields, required=("key", "operator"))(path, requirement)
    check_label(f"{path}.key", requirement["key"])
    operator, values = requirement["operator"], requirement.get("values") or []
    if operator in ("In", "NotIn") and not values:
        raise refuse(f"{path}.values", values, f"at least one with operator {operator!r}")
    if operator in ("Exists", "DoesNotExist") and values:
        raise refuse(f"{path}.values", values, f"none with operator {operator!r}")
    if operator in ("Gt", "Lt") and len(values) != 1:
        raise refuse(f"{path}.values", values, f"exactly one with operator {operator!r}")
    for index, value in enumerate(values):
        check_label_value(f"{path}.values.{index}", value or "")


def required_terms(affinity: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The requirements of each term of an affinity that check_affinity took; a node must meet all of one term."""
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [term.get("matchExpressions") or [] for term in required.get("nodeSelectorTerms") or []]


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


def check_volumes(path: str, volumes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless a pod can have these volumes."""
    mode = _between(0, _MODE_MAX)
    item = _mapping({"key": _text, "path": _path_inside, "mode": mode}, required=("key", "path"))
    files = {"defaultMode": mode, "optional": _boolean, "items": _list_of(item)}
    volume = _mapping(
        {
            "name": _text,
            "emptyDir": _mapping({"medium": _text, "sizeLimit": _quantity}),
            "persistentVolumeClaim": _mapping({"claimName": _text, "readOnly": _boolean}, required=("claimName",)),
            "hostPath": _mapping({"path": _no_way_up, "type": _one_of(*_HOST_PATH_TYPES)}, required=("path",)),
            "secret": _mapping({"secretName": _text, **files}, required=("secretName",)),
            "configMap": _mapping({"name": _text, **files}, required=("name",)),
        },
        required=("name",),
    )
    names: set[str] = set()
    for index, each in enumerate(volumes):
        place = f"{path}.{index}"
        volume(place, each)
        name = each["name"]
        if not _DNS_LABEL.fullmatch(name):
            allowed = "up to 63 small letters, digits and '-', with a letter or digit at the beginning and the end"
            raise refuse(f"{place}.name", name, allowed)
        if name in names:
            raise refuse(f"{place}.name", name, "a name of its own for each volume")
        names.add(name)
        # The server makes an empty directory of a volume that says nothing.
        sources = {source: what for source, what in each.items() if source != "name"}
        if any(what is not None for what in sources.values()):
            _only_one(place, sources)


def check_mounts(path: str, mounts: Sequence[Mapping[str, Any]], volumes: Sequence[str] | None) -> None:
    """Raise ValueError unless a container can mount so; volumes: the names that are there, None if unknown."""
    fields = {"name": _text, "mountPath": _text, "readOnly": _boolean, "subPath": _path_inside}
    places: set[str] = set()
    for index, mount in enumerate(mounts):
        place = f"{path}.{index}"
        _mapping(fields, required=("name", "mountPath"))(place, mount)
        if volumes is not None and mount["name"] not in volumes:
            raise refuse(
                f"{place}.name", mount["name"], f"the name of a volume: {', '.join(volumes) or 'there is none'}"
            )
        if mount["mountPath"] in places:
            raise refuse(f"{place}.mountPath", mount["mountPath"], "a path of its own for each mount")
        places.add(mount["mountPath"])


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


def _between(least: int, most: int) -> Checker:
    def check(path: str, value: Any) -> None:
        _integer(path, value)
        if value is not None and not least <= value <= most:
            raise refuse(path, value, f"{least} to {most}")

    return check


def _one_of(*names: str) -> Checker:
    def check(path: str, value: Any) -> None:
        if value is not None and value not in names:
            raise refuse(path, value, ", ".join(name for name in names if name))

    return check


def _quantity(path: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refuse(path, value, "a Kubernetes quantity")
    try:
        amount(str(value).strip())
    except ValueError as error:
        raise refuse(path, value, str(error).removeprefix("allowed: ")) from None


def _no_way_up(path: str, value: Any) -> None:
    _text(path, value)
    if ".." in (value or "").split("/"):
        raise refuse(path, value, "a path without '..'")


def _path_inside(path: str, value: Any) -> None:
    _no_way_up(path, value)
    if (value or "").startswith("/"):
        raise refuse(path, value, "a path that does not begin with '/'")


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


def _list_of(checker: Checker, *, at_least_one: bool = False) -> Checker:
    def check(path: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, list | tuple):
            raise refuse(path, value, "a list")
        if at_least_one and not value:
            raise refuse(path, value, "at least one item")
        for index, item in enumerate(value):
            if item is None:
                raise refuse(f"{path}.{index}", item, "no null in a list")
            checker(f"{path}.{index}", item)

    return check
