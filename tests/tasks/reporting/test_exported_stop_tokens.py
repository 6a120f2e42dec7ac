"""The stop tokens of a run in the model that is exported from it, for engines that serve it."""

import json
from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, model_files, records
from storage.stores.memory import MemoryStore
from tasks.preparing.first_weights import publish_initial
from tasks.reporting.export_model import export_model
from tests.committed_runs import begin, plan_iteration
from tests.small_run import model_directory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 7]}),
        ({"eos_token_id": 2, "temperature": 0.6}, {"eos_token_id": [2, 7], "temperature": 0.6}),
        ({"eos_token_id": [2, 7, 9]}, {"eos_token_id": [2, 7, 9]}),
    ],
)
def test_those_that_the_models_files_do_not_name_are_named(tmp_path, generation, expected):
    folder = model_directory(tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    store = MemoryStore("initial")
    begin(store, {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in model_files.SUFFIXES})
    publish_initial(store, folder)
    plan = plan_iteration(store, 0)
    store.delete(layout.plan(0))
    sampling = replace(plan.sampling, stop_token_ids=(2, 7))
    records.commit(store, layout.plan(0), replace(plan, sampling=sampling))
    done = export_model(store, tmp_path / "out", ManualClock(), version=0)
    assert json.loads((done.path / "generation_config.json").read_text()) == expected
