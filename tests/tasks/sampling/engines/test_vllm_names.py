"""Every name of vLLM that we touch, against the release that is installed; and what is said where one is missing."""

import re
import subprocess
import sys

import pytest

from tasks.preparing.adapter_fit import WITHOUT_ADAPTERS
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.vllm_names import MEMBERS, NAMES, TRIED, installed_version, resolve
from tests.vllm_engines import MISSING, WHY_NOT

# vLLM and its libraries warn while they are imported.
pytestmark = pytest.mark.filterwarnings("default")
needs_vllm = pytest.mark.skipif(MISSING, reason=WHY_NOT)


@needs_vllm
@pytest.mark.parametrize("name", NAMES)
def test_the_installed_release_has(name):
    assert resolve(name) is not None


@needs_vllm
@pytest.mark.parametrize("name", MEMBERS)
def test_the_installed_releases_classes_have_the_members_we_call(name):
    found = resolve(name)
    missing = [member for member in MEMBERS[name].split() if not hasattr(found, member)]
    assert not missing, f"vLLM {installed_version()}: {name} has no {', '.join(missing)}; tried releases: {TRIED}"


@needs_vllm
def test_a_request_says_by_an_event_that_it_has_outputs():
    """Ours puts one event in the place of all."""
    collector = resolve("RequestOutputCollector")(resolve("RequestOutputKind").DELTA, "r0")
    collector.put(ValueError("an output"))
    assert collector.ready.is_set()
    with pytest.raises(ValueError, match="an output"):
        collector.get_nowait()
    assert not collector.ready.is_set()
    assert collector.get_nowait() is None


@needs_vllm
def test_the_installed_release_was_tried():
    found = installed_version()
    assert found in TRIED, f"vLLM {found} is new here: when `make test-vllm` passes otherwise, add it to TRIED"


@needs_vllm
@pytest.mark.parametrize(
    ("place", "missing", "cause"),
    [
        ("vllm.no_such_module", r"vllm\.no_such_module\.Gone", r"No module named 'vllm\.no_such_module'"),
        ("vllm.sampling_params", r"vllm\.sampling_params\.Gone", r"has no attribute 'Gone'"),
        ("vllm.sampling_params:Other", r"vllm\.sampling_params\.Other", r"has no attribute 'Other'"),
    ],
    ids=["module", "attribute", "attribute of another name"],
)
def test_a_name_that_is_gone_is_told_with_its_purpose_and_the_releases_that_have_it(monkeypatch, place, missing, cause):
    monkeypatch.setitem(NAMES, "Gone", (place, "what it was for"))
    with pytest.raises(EngineError) as caught:
        resolve("Gone")
    tried = re.escape(", ".join(TRIED))
    assert caught.match(rf"^vLLM {installed_version()} has no {missing} \(what it was for\); tried releases: {tried}: ")
    assert caught.match(rf"{cause}[^\n]*$")


@pytest.mark.skipif(not MISSING, reason="vLLM is installed")
@pytest.mark.parametrize("name", NAMES)
def test_without_vllm_it_is_said_that_it_is_not_installed(name):
    with pytest.raises(EngineError, match=r"^rollout\.engine: vLLM is not installed; see docs/guide/first_run\.md$"):
        resolve(name)


def test_to_ask_for_the_version_imports_nothing_of_it():
    code = (
        "import sys; from tasks.sampling.engines.vllm_names import installed_version; installed_version(); "
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"


@needs_vllm
def test_the_installed_vllm_adapts_none_of_these_and_what_most_people_train():
    from vllm.model_executor.models import ModelRegistry, supports_lora  # noqa: PLC0415

    for name in WITHOUT_ADAPTERS:
        assert not supports_lora(ModelRegistry.models[name].load_model_cls()), name
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"):
        assert supports_lora(ModelRegistry.models[name].load_model_cls()), name
