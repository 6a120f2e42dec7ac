"""Labels of Kubernetes, by the rules of its API server, those of spot machines, and those of a run's pods."""

import hashlib
import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_PREFIX_CHARACTERS_MAX = 253
_SPOT = re.compile(r"(^|[^a-z])(spot|preemptible)($|[^a-z])", re.IGNORECASE)
_NO = {"", "false", "no", "0"}
# Every pod of a run has these, so that costs and quotas can be split by them.
RUN_LABEL, ITERATION_LABEL, POOL_LABEL = COST_LABELS = ("gleaner-run", "gleaner-iteration", "gleaner-pool")
FLEET_LABEL = "gleaner-fleet"
# Of a launch plan: the digest of the settings with which it was registered.
SETTINGS_ANNOTATION = "gleaner-settings"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_TAIL_CHARACTERS_MAX = 40


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


def check_labels(path: str, labels: Mapping[str, str | None]) -> None:
    """Raise ValueError unless a pod or a node selector can have these labels; null is the empty value."""
    for label, value in labels.items():
        check_label(path, label)
        check_label_value(f"{path}.{label}", value or "")


def is_spot_label(label: str, value: str) -> bool:
    """True if only spot machines have this label: name or value contains the word, as in all large clouds."""
    return bool(_SPOT.search(value)) or (bool(_SPOT.search(label)) and value.lower() not in _NO)


def url_label(url: str) -> str:
    """The label value for a URL: its last part and a digest, because labels allow fewer characters than URLs."""
    tail = re.sub(r"[^A-Za-z0-9]+", "-", url.rstrip("/").rpartition("/")[2])[:_TAIL_CHARACTERS_MAX].strip("-")
    digest = hashlib.blake2s(url.rstrip("/").encode(), digest_size=4).hexdigest()
    return f"{tail}-{digest}" if tail else digest
