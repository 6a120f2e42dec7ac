"""The build backend of pyproject.toml: setuptools for `pip install -e`, and one line for everything else.

A wheel would put packages with names such as `tasks` and `storage` at the top of site-packages, beside those of others,
and away from the folder by which Flyte finds the workflows.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "prepare_metadata_for_build_editable",
]
REFUSAL = "gleaner is used from a clone of its repository, and there is no wheel of it; allowed: pip install -e ."


def build_wheel(
    _directory: str, _settings: Mapping[str, Any] | None = None, _metadata_directory: str | None = None
) -> NoReturn:
    """Refuse; the installer shows the line."""
    raise SystemExit(REFUSAL)


def build_sdist(_directory: str, _settings: Mapping[str, Any] | None = None) -> NoReturn:
    """Refuse; a source distribution is there to build a wheel from."""
    raise SystemExit(REFUSAL)
