"""The page of models says what vLLM's CPU build does with each family. With WRITE_MODELS_PAGE=1 it is written anew."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.vllm_engine import VllmEngine
from tests.model_families import CONTEXT_LENGTH, FAMILIES
from tests.models_page import RIGHT, agree, of_engine, plain_logprobs
from tests.tiny_model import VOCAB_SIZE
from tests.vllm_engines import MISSING, WHY_NOT

pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
# Each costs a start of vLLM: those that are used most, and some for which it differs from the torch engine.
# Mixtures first: what vLLM makes for experts, it makes with the first engine of a process or not at all.
TRIED = (
    *("Mixtral", "Qwen3-MoE", "Llama", "Qwen2, Qwen2.5", "Qwen3", "Mistral", "Mistral, window below the context"),
    *("Gemma", "Gemma 3, text", "Phi-3", "Phi-3, longrope, context up to the original", "GPT-2", "OLMo 2", "SmolLM3"),
    *("Granite, scaled logits", "FP8 weights", "Code of its own"),
)


@pytest.mark.slow
def test_the_page_says_what_vllm_does_with_each_family(tmp_path):
    found, engines = {}, []

    def build(model):
        engine = VllmEngine(
            model,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            max_responses_in_flight=2,
            context_length=CONTEXT_LENGTH,
            config=VllmConfig(process="same"),
        )
        # vLLM in this process has global state, which the first engine that ends takes from all others.
        engines.append(engine)
        return engine

    # In another process, because vLLM changes the classes of transformers where it has none of its own.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        by_title = {family.title: family for family in FAMILIES}
        for number, family in enumerate(by_title[title] for title in TRIED):
            model = tmp_path / str(number)
            family.save(model)
            found[family.title] = of_engine(
                model,
                lambda model=model: build(model),
                lambda model, tokens: apart.submit(plain_logprobs, model, tokens).result(),
            )
    for engine in engines:
        engine.close()
    assert agree("vLLM", found) == {}
    assert sum(cell == RIGHT for cell in found.values()) > len(TRIED) // 2
