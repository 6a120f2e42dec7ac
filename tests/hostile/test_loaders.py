"""Model folders that bring code of their own, or name a hub's: no loader runs it, asks for it or fetches it.

To add a case, add fields of tokenizer_config.json or config.json to FOLDERS, or a function of a folder to LOADERS.
"""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.critic import Critic
from tasks.learning.policy import Policy
from tasks.learning.pretrained import ModelError
from tasks.learning.trained_model import PolicyError
from tasks.models.configuration import ModelConfigurationError, read_model_config
from tasks.preparing.tools import open_tokenizer
from tasks.prompts.decode import open_decoder
from tasks.sampling.engines.decoder import model_config
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.hf_decoder import HuggingFaceDecoder
from tests.tiny_model import tiny_config, tiny_tokenizer

CODE = "import pathlib\npathlib.Path({ran!r}).touch()\nclass Own:\n    pass\n"
KINDS = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")

# (fields of tokenizer_config.json, fields of config.json)
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokenizer here": ({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}, {}),
    "fast tokenizer here": ({"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "OwnFast"}, {}),
    "tokenizer elsewhere": ({"auto_map": {"AutoTokenizer": ["a/b--own.Own", None]}, "tokenizer_class": "Own"}, {}),
    "model here": ({}, {"auto_map": dict.fromkeys(KINDS, "own.Own")}),
    "model elsewhere": ({}, {"auto_map": dict.fromkeys(KINDS, "a/b--own.Own")}),
    "unknown model here": ({}, {"auto_map": dict.fromkeys(KINDS, "own.Own"), "model_type": "own"}),
    "unknown model elsewhere": ({}, {"auto_map": dict.fromkeys(KINDS, "a/b--own.Own"), "model_type": "own"}),
    "known configuration, own model": ({}, {"auto_map": dict.fromkeys(KINDS[1:], "own.Own"), "model_type": "t5"}),
    "the tokenizer's code named by the model": ({"tokenizer_class": "Own"}, {"auto_map": {"AutoTokenizer": "own.Own"}}),
}

LOADERS: dict[str, Callable[[Path], object]] = {
    "open_tokenizer": open_tokenizer,
    "open_decoder": open_decoder,
    "read_model_config": read_model_config,
    "model_config": model_config,
    "Policy": lambda folder: Policy(folder, {}, TrainerConfig()),
    "Critic": lambda folder: Critic(folder, {}, TrainerConfig()),
    "HuggingFaceDecoder": lambda folder: HuggingFaceDecoder(
        read_model_config(folder), dtype=torch.float32, device=torch.device("meta"), context_length=8
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_no_code_is_run_asked_for_or_fetched(tmp_path: Path, monkeypatch: Any, folder: str, loader: str):
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.setattr(socket.socket, "connect", lambda _socket, address: asked.append(address))
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    for name, fields in zip(("tokenizer_config.json", "config.json"), FOLDERS[folder], strict=True):
        file = tmp_path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    refusal = ""
    try:
        LOADERS[loader](tmp_path)
    except (ModelError, ModelConfigurationError, PolicyError, EngineError) as error:
        refusal = str(error)
    assert asked == []
    assert not (tmp_path / "ran").exists()
    assert "\n" not in refusal
