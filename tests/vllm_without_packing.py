"""VLLM's CPU build with linear layers as on a GPU: parameters as they are loaded, instead of packed copies of them."""

import importlib
from pathlib import Path
from typing import Any

import pytest

_MODULE, _FUNCTION = "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"
# Python runs this at its start, also in the processes that vLLM starts.
_SITE = f"""
import importlib.util, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name != {_MODULE!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def executed(module):
            execute(module)
            from tests.vllm_without_packing import plain
            module.{_FUNCTION} = plain
        spec.loader.exec_module = executed
        return spec
sys.meta_path.insert(0, Finder())
"""


def plain(layer: Any, remove_weight: bool) -> None:
    """Instead of vLLM's function."""
    import torch  # noqa: PLC0415 - other processes import this module, too

    layer.cpu_linear = torch.nn.functional.linear


def leave_weights(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let vLLM leave linear layers as they are, in this process and in those that it starts."""
    monkeypatch.setattr(importlib.import_module(_MODULE), _FUNCTION, plain)
    (folder / "sitecustomize.py").write_text(_SITE)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[1]}")
