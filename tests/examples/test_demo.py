import signal
from pathlib import Path

import yaml

from examples.demo import CONFIG, write_settings
from tasks.configuration.run_config import parse
from tests.forked import ForkedScript


def settings(folder: Path, engine: str) -> dict[str, object]:
    write_settings(folder / "settings.yaml", folder / "run", folder / "model", engine)
    found = yaml.safe_load((folder / "settings.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_settings_are_the_example_with_a_run_and_a_model(tmp_path: Path):
    example = yaml.safe_load(CONFIG.read_text())
    example["run"]["url"], example["policy"]["path"] = str(tmp_path / "run"), str(tmp_path / "model")
    assert settings(tmp_path, "torch") == example


def test_vllm_runs_in_the_slots_and_what_is_learned_stays(tmp_path: Path):
    config, usual = parse(settings(tmp_path, "vllm")), parse(settings(tmp_path, "torch"))
    assert (config.rollout.engine, config.rollout.vllm.process) == ("vllm", "same")
    assert (config.run, config.sampling, config.trainer) == (usual.run, usual.sampling, usual.trainer)


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path):
    (tmp_path / "demo-model").mkdir()
    # A shell that starts tests in the background lets them ignore SIGINT.
    program = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "runpy.run_module('examples.demo', run_name='__main__')"
    (tmp_path / "program.py").write_text(program)
    child = ForkedScript(tmp_path / "program.py", "--directory", str(tmp_path))
    assert child.stdout.readline().startswith("policy: ")
    child.send_signal(signal.SIGINT)
    told, errors = child.communicate(timeout=600)
    assert child.returncode == 130
    assert "Traceback" not in told + errors
