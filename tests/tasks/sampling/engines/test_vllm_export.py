"""A trained model, exported, in vLLM: loaded from its files as users load it, it says what transformers says."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from storage.clock import ManualClock
from tasks.reporting.export_model import export_model
from tests.small_run import config, memory_store, plan_iteration, roll_out, train_small
from tests.tiny_model import save_tiny_model, tiny_model
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config

pytestmark = pytest.mark.skipif(MISSING, reason=WHY_NOT)
URL = "memory://vllm-export"
# Several, because greedy decoding soon repeats itself: each adds tokens of its own.
PROMPTS = [[1, 5 + 7 * number, 9 + 5 * number, 20 + number, 7] for number in range(12)]
TOKENS = 24
# In a process of its own: an engine that ends takes vLLM's global state from those of other tests.
SCRIPT = """
import json, os, sys
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.vllm_settings import prepare_environment

if __name__ == "__main__":
    prepare_environment(VllmConfig(process="same"))
    from vllm import LLM, SamplingParams

    folder, prompts, tokens = json.loads(sys.argv[1])
    settings = dict(max_model_len=128, max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=8 << 20)
    llm = LLM(folder, dtype="float32", load_format="auto", **settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    text = llm.get_tokenizer().decode(prompts[0])
    print(json.dumps([text, [each.outputs[0].token_ids for each in found]]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with weight versions 0 and 1, of a model that vLLM has kernels for."""
    base = save_tiny_model(tmp_path_factory.mktemp("base"), tiny_model(vllm_tiny_config()))
    store = memory_store("vllm-export")
    plan_iteration(config(URL, base))
    roll_out(URL, 0)
    train_small(URL, 0)
    return store


def by_vllm(folder):
    """The first prompt as text, and what follows the prompts by greedy decoding."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(folder), PROMPTS, TOKENS])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def by_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


# Computed in float32, where the two agree to the last bits; in several files, which is what a large model is.
@pytest.mark.parametrize("dtype", ["stored", "bfloat16"])
def test_vllm_says_what_transformers_says(trained, tmp_path, dtype):
    done = export_model(trained, tmp_path / "out", ManualClock(), dtype=dtype, shard_bytes_max=40_000)
    assert (done.version, done.files > 1) == (1, True)
    text, tokens = by_vllm(done.path)
    assert tokens == by_transformers(done.path)
    assert len({token for each in tokens for token in each}) > 5
    assert text == AutoTokenizer.from_pretrained(done.path).decode(PROMPTS[0])
