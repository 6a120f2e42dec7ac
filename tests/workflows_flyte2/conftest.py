"""What is here needs both SDKs of Flyte: `make test-flyte2`. Elsewhere nothing of it is collected."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("flyte") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _module_path_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both SDKs add folders to the module path, and `flyte` keeps a database below the home folder."""
    before = list(sys.path)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    sys.path[:] = before
