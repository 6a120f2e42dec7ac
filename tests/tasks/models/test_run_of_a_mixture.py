"""A run whose model is stored with one tensor for each expert: every version and what is exported has these names."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from storage.clock import SystemClock
from storage.records import layout
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.reporting.export_model import export_model
from tasks.sampling.engines.weight_tensors import as_torch
from tests.small_run import commit_iteration, config, memory_store, plan_iteration, roll_out, train_small
from tests.tasks.models.families import write_family
from tests.tiny_model import VOCAB_SIZE, tiny_tokenizer

pytestmark = pytest.mark.slow

URL = "memory://mixture"
ITERATIONS = 2


def test_versions_and_the_exported_model_have_the_names_of_the_pretrained_one(tmp_path):
    model = tmp_path / "model"
    _, stored = write_family(model, "mixtral", vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(model)
    rollout = {"engine": "torch", "dtype": "float32", "max_responses_in_flight": 4}
    store = memory_store("mixture")
    for iteration in range(ITERATIONS):
        plan_iteration(config(URL, model, rollout=rollout))
        roll_out(URL, iteration)
        record = train_small(URL, iteration)
        # The trainer's log-probs against the sampler's, of the same version.
        assert record.metrics["mismatch_kl"] < 1e-8
        commit_iteration(URL, iteration)
    for version in range(ITERATIONS + 1):
        entries = read_manifest(store, layout.weights(version)).tensors
        assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(t.shape) for n, t in stored.items()}
    blocks = pull_version(store, ITERATIONS, None, SystemClock())[1]
    changed = [name for name in stored if not torch.equal(as_torch(blocks[name]), stored[name])]
    assert sum(".experts." in name for name in changed) > 12
    done = export_model(store, tmp_path / "exported", SystemClock())
    exported = load_file(done.path / "model.safetensors")
    assert exported.keys() == stored.keys()
    loaded, found = AutoModelForCausalLM.from_pretrained(done.path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(
        loaded.model.layers[1].mlp.experts.down_proj[3], exported["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    )
