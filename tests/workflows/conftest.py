"""A policy for whole runs, and what flytekit leaves behind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.warm_start import build_model, build_tokenizer


@pytest.fixture(autouse=True)
def module_path() -> Iterator[None]:
    """flytekit adds a folder to the module path for every task it meets, so that each import after it takes longer."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an untrained model, most of whose responses end at their limit, and its tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
