"""Where Kubernetes places a pod: labels of nodes and tolerations, checked by the rules of its API server."""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ConfigDict

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_PREFIX_CHARACTERS_MAX = 253
_SPOT = re.compile(r"(^|[^a-z])(spot|preemptible)($|[^a-z])", re.IGNORECASE)
_NO = {"", "false", "no", "0"}


@dataclass(frozen=True, kw_only=True)
class TolerationConfig:
    """A toleration of a pod, in the names of the Kubernetes Python client.

    key: that of the taint; without it, the operator "Exists" tolerates every taint. value: that of the taint, with the
    operator "Equal", which is the default. effect: None tolerates all. toleration_seconds: with "NoExecute" only.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None

    def __post_init__(self) -> None:
        if self.key:
            check_label("key", self.key)
        elif self.operator != "Exists":
            raise ValueError(f"operator: value {self.operator!r}; allowed without a key: 'Exists'")
        if self.operator == "Exists" and self.value:
            raise ValueError(f"value: value {self.value!r}; allowed with operator 'Exists': nothing")
        check_label_value("value", self.value or "")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError(
                f"toleration_seconds: value {self.toleration_seconds}; allowed with effect {self.effect!r}: nothing, "
                "because only 'NoExecute' evicts"
            )

    def given(self) -> dict[str, Any]:
        """The fields that are set, as arguments of the client's V1Toleration."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def check_label(field: str, label: str) -> None:
    """Raise ValueError, which begins with `field`, unless Kubernetes takes `label` as the name of a label or taint."""
    prefix, slash, name = label.rpartition("/")
    is_prefix = _PREFIX.fullmatch(prefix) is not None and len(prefix) <= _PREFIX_CHARACTERS_MAX
    if not _NAME.fullmatch(name) or (slash and not is_prefix):
        raise ValueError(
            f"{field}: label {label!r}; allowed: up to 63 letters, digits and ._- that begin and end with a letter or "
            "digit, behind a domain and '/' if need be"
        )


def check_label_value(field: str, value: str) -> None:
    """Raise ValueError, which begins with `field`, unless Kubernetes takes `value` as the value of a label or taint."""
    if value and not _NAME.fullmatch(value):
        raise ValueError(
            f"{field}: value {value!r}; allowed: nothing, or up to 63 letters, digits and ._- that begin and end with "
            "a letter or digit"
        )


def is_spot_label(label: str, value: str) -> bool:
    """Whether only spot machines have this label: its name or its value says so, as in all large clouds."""
    return bool(_SPOT.search(value)) or (bool(_SPOT.search(label)) and value.lower() not in _NO)
