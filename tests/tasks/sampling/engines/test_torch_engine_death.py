"""The engine in PyTorch without memory, or on a device that fails: it dies by name, and can be begun anew."""

import gc
import weakref

import pytest
import torch

from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.testing import assert_same, request, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.tiny_model import tiny_config, tiny_model, weight_blocks


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config("qwen2"))


def unloaded(model_dir, model):
    model.config.save_pretrained(model_dir)
    return TorchEngine(model_dir, max_responses_in_flight=4, context_length=64, device="cpu")


def loaded(model_dir, model):
    engine = unloaded(model_dir, model)
    engine.load_weights(0, weight_blocks(model))
    return engine


class Fails:
    """A decoder whose `verb` does something else, once."""

    def __init__(self, decoder, verb, instead):
        self.decoder, self.verb, self.instead = decoder, verb, instead

    def __getattr__(self, name):
        if name == self.verb:
            self.verb = None
            return self.instead
        return getattr(self.decoder, name)


def raising(error):
    def instead(*_, **__):
        raise error

    return instead


BREAKDOWNS = {
    "device memory": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee more")),
    "device": raising(torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with DSA")),
    "library": raising(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")),
    "host memory": lambda *_: torch.empty(1 << 50),
    "Python's memory": lambda *_: bytearray(1 << 60),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "prefill", "logits"])
@pytest.mark.parametrize("breakdown", BREAKDOWNS)
def test_a_breakdown_is_the_engines_death_and_restarted_it_does_what_it_would_have_done(
    tmp_path, model, verb, breakdown
):
    engine = loaded(tmp_path, model)
    requests = [request(r) for r in range(4)]
    whole = run(engine, requests)
    engine.load_weights(0, weight_blocks(model))
    engine._decoder = Fails(engine._decoder, verb, BREAKDOWNS[breakdown])

    def goes_on():
        engine.load_weights(0, weight_blocks(model))
        run(engine, requests)

    with pytest.raises(EngineDied) as died:
        goes_on()
    assert "\n" not in str(died.value)
    engine.restart()
    assert (engine._cache, engine._batch, engine._decoder) == (None, None, None)
    engine.load_weights(0, weight_blocks(model))
    assert_same(run(engine, requests), whole)


@pytest.mark.parametrize("verb", ["load", "prefill", "logits"])
def test_a_breakdown_holds_the_old_cache_no_longer_than_its_exception_lives(tmp_path, model, verb):
    """Else a restarted engine has two caches on the device until Python's collector comes by."""
    engine = loaded(tmp_path, model)
    held = weakref.ref(engine._cache)
    engine._decoder = Fails(engine._decoder, verb, lambda *_: torch.empty(1 << 50))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(EngineDied) as died:
            run(engine, [request(0)]) if verb != "load" else engine.load_weights(0, weight_blocks(model))
        assert held() is not None
        del died
        engine.restart()
        assert held() is None
    finally:
        gc.enable()


def test_other_failures_are_not_taken_for_a_breakdown(tmp_path, model):
    engine = loaded(tmp_path, model)
    engine._decoder = Fails(engine._decoder, "logits", raising(RuntimeError("shapes do not match")))
    engine.start([request(0)])
    with pytest.raises(RuntimeError, match="shapes do not match"):
        engine.step()


def test_no_memory_for_the_trial_of_a_decoder_says_nothing_about_its_model(tmp_path):
    model = tiny_model(tiny_config("gpt_neox"))
    engine = unloaded(tmp_path, model)
    hook = engine._decoder._model.register_forward_pre_hook(BREAKDOWNS["device memory"])
    with pytest.raises(EngineDied, match="OutOfMemoryError: CUDA out of memory"):
        engine.load_weights(0, weight_blocks(model))
    hook.remove()
    engine.restart()
    engine.load_weights(0, weight_blocks(model))
    assert run(engine, [request(0)])


def test_a_device_that_fails_at_the_restart_too_is_given_up_and_can_be_closed(tmp_path, model, monkeypatch):
    engine = loaded(tmp_path, model)
    monkeypatch.setattr(torch, "zeros", BREAKDOWNS["device"])
    with pytest.raises(EngineDied, match=r"^AcceleratorError: CUDA error: device-side assert triggered$"):
        engine.restart()
    engine.close()
