"""Secrets in a configuration, which a run would keep and show: a line for each, without the secret."""

from collections.abc import Iterator, Mapping

from resources.secret_text import names_secret, secret_in

_ELSEWHERE = "a run keeps its configuration and shows it; give it to the pods by the field secrets of their pool"
# Where a pod's variables are, Kubernetes has a way of its own.
_OF_A_VARIABLE = "valueFrom with a secretKeyRef, or the pool's secrets"
_OF_A_URL = "a url without it; a store's credentials come from the environment"


def given_secrets(document: object, path: str = "", name: str = "") -> Iterator[str]:
    """The problem of each value below a path that is, or holds, a secret; name: that the value is given for."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from given_secrets(value, f"{path}.{key}".lstrip("."), _name_of(document, str(key), name))
    elif isinstance(document, list | tuple):
        for index, value in enumerate(document):
            # Items that are mappings have names of their own.
            yield from given_secrets(value, f"{path}.{index}", "" if isinstance(value, Mapping) else name)
    elif isinstance(document, str):
        what = secret_in(document, name)
        if what is not None:
            yield f"{path}: {what} given; allowed: {_allowed(path, what)}"
    elif isinstance(document, int | float) and not isinstance(document, bool) and names_secret(name):
        yield f"{path}: a number whose name says that it is secret given; allowed: {_allowed(path, '')}"


def _name_of(section: Mapping[object, object], key: str, name: str) -> str:
    """What a value of a section is called: a variable by the name beside it, and `api: {key: ...}` as `api_key`."""
    beside = section.get("name")
    if key == "value" and isinstance(beside, str):
        return beside
    return f"{name}_{key}" if name else key


def _allowed(path: str, what: str) -> str:
    if ".env." in path:
        return f"{_OF_A_VARIABLE}, because a run keeps its configuration and shows it"
    is_place = what.startswith("a url") and ".arguments" not in path
    return _OF_A_URL if is_place else f"nothing secret, because {_ELSEWHERE}"
