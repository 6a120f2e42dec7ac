"""The check of a model: in a process of its own where this one has no torch, and what it says when that one dies."""

import json
import subprocess
import sys

import pytest

from tasks.learning.pretrained import ModelError
from tasks.preparing import model_check
from tasks.preparing.model_check import check_model_use
from tasks.preparing.model_use import use_of
from tests.processes import LIMIT_S, ROOT
from tests.small_run import config, document
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

# A Python that has not imported torch; with "absent" it does not find torch either.
APART = """
import json, sys
from pathlib import Path
from tasks.configuration.run_config import parse
from tasks.preparing import model_check
if sys.argv[3:] == ["absent"]:
    model_check.find_spec = lambda name: None
try:
    found = model_check.check_model_use(parse(json.loads(sys.argv[1])), Path(sys.argv[2]))
    said = [found.looked_at, *found.doubts]
except ValueError as error:
    said = [f"{type(error).__name__}: {error}"]
print(json.dumps([said, "torch" in sys.modules]))
"""


def told_apart(model, *arguments):
    asked = json.dumps(document("memory://model-check", model, rollout={"engine": "torch"}))
    command = [sys.executable, "-c", APART, asked, str(model), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, check=True)
    said, has_torch = json.loads(ended.stdout)
    assert has_torch is False
    return said


def use(model):
    return use_of(config("memory://model-check", model, rollout={"engine": "torch"}), model)


@pytest.mark.slow
def test_without_torch_in_this_process_another_one_tries_the_model(model, tmp_path):
    [looked_at] = told_apart(model)
    assert looked_at.startswith(f"{model} in trainer and engine, in ")
    granite = save_tiny_model(tmp_path, tiny_model(tiny_config("granite", logits_scaling=8.0)))
    with pytest.raises(ModelError) as here:
        check_model_use(config("memory://model-check", granite, rollout={"engine": "torch"}), granite)
    assert told_apart(granite) == [f"ModelError: {here.value}"]


@pytest.mark.slow
def test_where_torch_is_not_installed_the_headers_are_looked_at_and_the_rest_is_doubted(model, tmp_path):
    [_, doubt] = told_apart(model, "absent")
    assert doubt.startswith("whether engine and trainer can use the model, because torch is not installed here")
    made = tiny_config("llama", quantization_config={"quant_method": "fp8"})
    quantised = save_tiny_model(tmp_path, tiny_model(tiny_config("llama")))
    made.save_pretrained(quantised)
    [refused] = told_apart(quantised, "absent")
    assert "quantization_config says that the weights are quantised (fp8)" in refused


DEATHS = [
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with SIGKILL, perhaps for want of memory"),
    ("import sys; sys.stderr.write('first\\nlast line\\n'); sys.exit(3)", "ended with status 3: last line"),
    ("", "ended with status 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "how"), DEATHS)
def test_a_process_that_dies_of_the_model_is_one_clear_line(model, tmp_path, monkeypatch, dies, how):
    (tmp_path / "dying_program.py").write_text(f"print('ready', flush=True)\n{dies}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_check, "_PROGRAM", "dying_program")
    with pytest.raises(ModelError, match=f"the process that tries the model of .* without its weights {how}") as caught:
        model_check._tried_apart(use(model), model)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_process_that_cannot_begin_says_nothing_about_the_model(model, tmp_path, monkeypatch):
    (tmp_path / "dying_program.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_check, "_PROGRAM", "dying_program")
    [doubt] = model_check._tried_apart(use(model), model)
    assert "ended with status 1: ModuleNotFoundError: No module named 'no_such_library'" in doubt


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended(model, tmp_path, monkeypatch):
    (tmp_path / "dying_program.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_check, "_PROGRAM", "dying_program")
    monkeypatch.setattr(model_check, "TIME_LIMIT_S", 2.0)
    with pytest.raises(ModelError, match=r"takes longer than 2 s"):
        model_check._tried_apart(use(model), model)


def test_the_same_files_are_tried_once_and_changed_ones_again(model, tmp_path):
    before = model_check._tried_here.cache_info()
    here = save_tiny_model(tmp_path, tiny_model(tiny_config("llama")))
    settings = config("memory://model-check", here, rollout={"engine": "torch"})
    for _ in range(3):
        check_model_use(settings, here)
    assert model_check._tried_here.cache_info().misses == before.misses + 1
    file = here / "config.json"
    file.write_text(file.read_text().replace('"vocab_size": 96', '"vocab_size": 97'))  # as long as before
    with pytest.raises(ModelError, match="has shape"):
        check_model_use(settings, here)
