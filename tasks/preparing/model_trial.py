"""Whether trainer and engine can use a model: both are built without weights, and a small copy of the model is run.

The trial finds refusals ahead of paid machines: names, shapes and ties of the stored tensors, the head, layers and
positions that the engine's cache does not serve. The module imports torch and transformers; `model_check` runs the
trial in a separate process unless torch is imported already.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from resources.model_config import CONFIG, model_fields
from storage.records.canonical import decode
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy, inject_adapters
from tasks.learning.batching import TokenBatch, collate
from tasks.learning.critic import Critic
from tasks.learning.policy import Policy, build_module, names_in
from tasks.learning.pretrained import ModelError, read_tensors, same_values, tensor_headers
from tasks.learning.ranks import Ranks
from tasks.learning.trained_model import PolicyError, read_architecture
from tasks.models.configuration import read_model_config
from tasks.models.stored_names import StoredNames, StoredNamesError, different_ties, has_experts
from tasks.preparing.model_use import ModelUse
from tasks.preparing.small_copy import save_small_copy
from tasks.sampling.engines.decoder import build_decoder, read_config
from tasks.sampling.engines.engine import EngineError, GenerationRequest
from tasks.sampling.engines.fused_decoder import fuses
from tasks.sampling.engines.steady_positions import unsteady
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_names import EXPERTS_ON_CPU
from tasks.sampling.engines.weight_tensors import as_torch, on_meta

# Printed by the program after the imports.
READY = "ready"
_META = torch.device("meta")
# The tables of positions of the fused decoder take memory, and do not depend on the context otherwise.
_FUSED_CONTEXT = 4096
_PROMPTS, _NEW_TOKENS = ((5, 6, 7), tuple(range(8, 20))), 8
# Nats; in float32 rounding gives about 1e-5.
_GAP_MAX = 1e-3
_SETTINGS = TrainerConfig(device="cpu")


def try_model(use: ModelUse, model_dir: Path) -> list[str]:
    """Raise ModelError for a model that a run cannot use as configured; returns the doubts.

    Where either engine may generate, a refusal by the torch engine is a doubt.
    """
    _check_known(model_dir)
    headers = on_meta(tensor_headers(model_dir))
    doubts = _check_trainer(use, model_dir, headers)
    refusal = _torch_refusal(use, model_dir, headers) if use.torch else None
    try:
        doubts += _run_small_copy(use, model_dir, with_engine=use.torch and refusal is None)
    except EngineError as error:
        refusal = f"policy.path: the torch engine does not serve this model: {error}"
    except (RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
        # The sizes of the copy differ from the model's, and the model's code may allow the model's sizes alone.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        doubts.append(
            f"policy.path: whether trainer and engine agree about this model; a small copy of it fails: {reason}"
        )
    if refusal is not None and not use.vllm:
        raise ModelError(refusal)
    if use.vllm:
        doubts += _check_vllm(use, model_dir, is_needed=refusal is not None or not use.torch)
    if refusal is not None:
        doubts.append(f"{refusal}; so rollout.engine auto needs vLLM on every machine that generates")
    return doubts


def _check_known(model_dir: Path) -> None:
    """Raise ModelError for a kind without a language model in transformers: code in the directory is never run."""
    import transformers  # noqa: PLC0415 - seconds
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    fields = model_fields(model_dir)
    kind = json.loads((model_dir / CONFIG).read_text(encoding="utf-8")).get("model_type")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if kind in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"policy.path: {model_dir / CONFIG}: of model_type {kind!r} transformers has no causal language "
            "model, which reads and writes text alone; allowed: such a model"
        )
    own = ", and its own code (auto_map) is never run" if fields.get("auto_map") else ""
    raise ModelError(
        f"policy.path: {model_dir / CONFIG}: model_type {str(kind)[:80]!r} is not one that transformers "
        f"{transformers.__version__} knows{own}; allowed: a model_type of transformers"
    )


def _check_trainer(use: ModelUse, model_dir: Path, headers: Mapping[str, Tensor]) -> list[str]:
    try:
        module = build_module(model_dir, Ranks(device=_META), lambda _module: None)
        names = names_in(read_architecture(model_dir), headers)
        _check_ties(names, model_dir)
    except (PolicyError, StoredNamesError) as error:
        raise ModelError(f"policy.path: {error}") from None
    reason = unsteady(module, use.context_length)
    if reason is not None:
        raise ModelError(reason)
    if use.lora is None:
        return []
    if find_spec("peft") is None:
        return ["lora: whether the model's layers can be adapted, because peft is not installed here"]
    inject_adapters(module, use.lora)
    return []


def _check_ties(names: StoredNames, model_dir: Path) -> None:
    for alias, name in names.ties:
        if not same_values(model_dir, alias, name):
            raise different_ties(alias, name)


def _torch_refusal(use: ModelUse, model_dir: Path, headers: Mapping[str, Tensor]) -> str | None:
    """Why the torch engine does not serve the model; None if the engine does."""
    try:
        architecture = read_config(model_dir, use.context_length)
        context = _reach(use, architecture)
        decoder = build_decoder(architecture, dtype=getattr(torch, use.dtype), device=_META, context_length=context)
        StoredNames(decoder.module, headers)
    except Exception as error:  # noqa: BLE001 - fields of a wrong kind raise anything in a model's code
        known = isinstance(error, EngineError | StoredNamesError)
        reason = " ".join(f"{'' if known else f'{type(error).__name__}: '}{error}".split())
        return f"policy.path: the torch engine does not serve this model: {reason}"
    return None


def _check_vllm(use: ModelUse, model_dir: Path, *, is_needed: bool) -> list[str]:
    """The doubts about vLLM; raises ModelError if only vLLM may generate, and vLLM computes a different model.

    Whether the release of vLLM knows the class of the model, only vLLM can tell.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds

    doubts: list[str] = []
    named = model_fields(model_dir).get("architectures")
    with _META:
        module = AutoModelForCausalLM.from_config(read_model_config(model_dir), trust_remote_code=False)
    own = type(module).__name__
    if named and own not in named:
        doubts.append(
            f"policy.path: {model_dir / CONFIG}: architectures is {json.dumps(named)[:80]}, which vLLM would build, "
            f"and the trainer builds {own}; allowed: [{json.dumps(own)}]"
        )
    if has_experts(module) and use.on_cpu:
        doubts.append(EXPERTS_ON_CPU)
    if doubts and is_needed:
        raise ModelError(doubts[0])
    if has_experts(module) and not use.on_cpu:
        doubts.append(
            "rollout.engine: whether vLLM computes this mixture of experts when its weights are loaded anew, which its "
            "CPU build does not; compare it on your GPU (python -m benchmarks.engine_parity), and look at mismatch_kl"
        )
    return doubts


def _run_small_copy(use: ModelUse, model_dir: Path, *, with_engine: bool) -> list[str]:
    """Let trainer and engine run a small copy, if a copy can be made; returns the doubts.

    Raises EngineError if the engine does not serve the copy, and ModelError if the trainer refuses the copy or computes
    different log-probs.
    """
    with TemporaryDirectory(prefix="gleaner-model-") as folder:
        small = Path(folder)
        if not save_small_copy(read_model_config(model_dir), small):
            return []
        tensors = read_tensors(small)
        completions: list[list[int]] = [[9, 10, 11] for _ in _PROMPTS]
        sampled: list[list[float]] = []
        refusal: EngineError | None = None
        if with_engine:
            try:
                completions, sampled = _generated(use, small, tensors)
            except EngineError as error:
                refusal = error
        try:
            trained, doubts = _trained(use, small, tensors, completions)
        except PolicyError as error:
            raise ModelError(f"policy.path: the trainer does not train this model: {error}") from None
    if refusal is not None:
        raise refusal
    pairs = [pair for rows in zip(sampled, trained, strict=False) for pair in zip(*rows, strict=True)]
    gap = max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)
    if not gap <= _GAP_MAX:
        raise ModelError(
            f"policy.path: on a small copy of this model, log-probs of the torch engine and the trainer differ by "
            f"{gap:.2g} nats; allowed: {_GAP_MAX:g}"
        )
    return doubts


def _generated(
    use: ModelUse, small: Path, tensors: Mapping[str, TensorBlock]
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probs by the torch engine for the prompts of the trial."""
    context = _reach(use, read_model_config(small))
    engine = TorchEngine(small, device="cpu", max_responses_in_flight=len(_PROMPTS), context_length=context)
    engine.load_weights(0, tensors)
    sampling = SamplingParams(max_completion_length=_NEW_TOKENS)
    prompts = [prompt[: context - 1] for prompt in _PROMPTS]
    engine.start([GenerationRequest(n, n, prompt, (), n, sampling) for n, prompt in enumerate(prompts)])
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    while deltas := engine.step():
        for delta in deltas:
            found[delta.response][0].extend(delta.token_ids)
            found[delta.response][1].extend(delta.logprobs)
    return [tokens for tokens, _ in found], [logprobs for _, logprobs in found]


def _trained(
    use: ModelUse, small: Path, tensors: Mapping[str, TensorBlock], completions: list[list[int]]
) -> tuple[list[list[float]], list[str]]:
    """Log-probs of the trainer's policy in float32 for the completions of the prompts, and the doubts.

    Also runs the backward pass, in the run's dtype too, and the critic, if the run has a critic.
    """
    given = {name: as_torch(block) for name, block in tensors.items()}
    prompts = [list(prompt[: use.context_length - 1]) for prompt in _PROMPTS]
    batch = collate(list(range(len(prompts))), prompts, completions, [[0.0] * len(each) for each in completions])
    if use.critic:
        Critic.of_policy(small, given, _SETTINGS).values(batch)
    logprobs = _pass(use, small, given, batch, _SETTINGS).tolist()
    rows = [row[: len(each)] for row, each in zip(logprobs, completions, strict=True)]
    if use.trainer_dtype == _SETTINGS.dtype:
        return rows, []
    try:
        _pass(use, small, given, batch, replace(_SETTINGS, dtype=use.trainer_dtype))
    except (PolicyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        if use.trainer_on_cpu:
            raise PolicyError(reason) from None
        # A GPU may have kernels that a CPU lacks.
        return rows, [f"trainer.dtype: whether the model trains in {use.trainer_dtype}, which fails on a CPU: {reason}"]
    return rows, []


def _pass(
    use: ModelUse, small: Path, given: Mapping[str, Tensor], batch: TokenBatch, settings: TrainerConfig
) -> Tensor:
    """The log-probs of a pass forward and backward by the trainer's policy."""
    policy: Policy
    if use.lora is not None and find_spec("peft") is not None:
        policy = AdaptedPolicy(small, given, settings, use.lora, seed=0)
    else:
        policy = Policy(small, given, settings)
    logprobs, _, objective = policy.objective(batch, 1.0, lambda each, _: each)
    objective.backward()  # type: ignore[no-untyped-call]
    return logprobs


def _reach(use: ModelUse, architecture: Any) -> int:
    """The context of an engine that is only built."""
    return min(use.context_length, _FUSED_CONTEXT) if fuses(architecture) else use.context_length


def main() -> None:
    """Read a use from standard input, try the model in the directory of the argument, and write the findings."""
    # Where memory runs out, this process ends instead of its parent, and the parent reports the end.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    _tell(READY)
    use = decode(ModelUse, "the request", sys.stdin.buffer.read())
    try:
        reply: dict[str, Any] = {"doubts": try_model(use, Path(sys.argv[1]))}
    except ValueError as error:
        reply = {"refusal": str(error)}
    _tell(json.dumps(reply))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
