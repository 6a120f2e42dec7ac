"""The extension of vLLM's workers: handed-over weights, drafts, and an end with the process that started vLLM.

vLLM finds the class by its name and calls it in every worker. All workers of an engine share a machine.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from tasks.sampling.engines.vllm_adapter import adapter_request, check_loaded
from tasks.sampling.engines.vllm_handover import Handed, received
from tasks.sampling.engines.vllm_names import resolve
from tasks.sampling.engines.vllm_patch import digests, patch, why_whole
from tasks.sampling.engines.vllm_settings import OWNER

# Where a model keeps its own way from hidden states to logits.
_PLAIN_LOGITS = "gleaner_plain_logits"


class WorkerExtension:
    """A mixin of vLLM's worker class."""

    # vLLM's worker has these.
    reload_weights: Any
    add_lora: Any
    model_runner: Any
    device: Any

    def gleaner_load(self, given: Handed) -> float:
        """Replace all weights by the handed-over tensors; returns the seconds taken.

        With new weights vLLM forgets the adapter. Tied parameters are given under every name: vLLM's CPU build keeps a
        packed copy of the head, and renews it only from the head's own name.
        """
        began_s = time.perf_counter()
        self.reload_weights(weights_iterator=received(given))
        return time.perf_counter() - began_s

    def gleaner_patch(self, shapes: dict[str, list[int]], given: Handed, whole: Handed | None) -> float | str:
        """Change some elements of the weights in place; returns the seconds, or why the weights must be loaded whole.

        After a reason the weights are undefined. whole: all weights, loaded afterwards for a comparison.
        """
        began_s = time.perf_counter()
        model = self.model_runner.get_model()
        try:
            reason = why_whole(model)
            if reason is None:
                patch(model, shapes, received(given), self.device)
                taken_s = time.perf_counter() - began_s
                if whole is None:
                    return taken_s
                found = digests(model)
                self.gleaner_load(whole)
                if digests(model) == found:
                    return taken_s
                reason = "patched weights are not the same as whole ones"
        except Exception as error:  # noqa: BLE001 - a loader may raise anything; the whole load that follows tells
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return reason

    def gleaner_draft_from_siblings(self) -> None:
        """Put our speculator in the place of vLLM's; for an engine that has started, and has no request."""
        # Triton, which this imports, is there only where vLLM drafts.
        from tasks.sampling.engines.vllm_sampler import KeyedSlots  # noqa: PLC0415
        from tasks.sampling.engines.vllm_siblings import install  # noqa: PLC0415

        install(self.model_runner, KeyedSlots)

    def gleaner_remember(self, scope: int, responses: list[list[int]]) -> None:
        """Hand responses that were generated elsewhere or earlier to our speculator."""
        self.model_runner.speculator.remember(scope, responses)

    def gleaner_load_draft_model(self, given: Handed) -> None:
        """Replace the weights of vLLM's draft model by the handed-over tensors, given as for `gleaner_load`."""
        speculator = self.model_runner.speculator
        settings = speculator._draft_vllm_config  # noqa: SLF001 - vLLM's way for a draft model needs a transfer engine
        resolve("reload_weights")(settings, speculator.model, received(given), None, True)

    def gleaner_score(self, temperature: float, vocabulary: int) -> None:
        """Have log-probs of prompts be those at a temperature, over the first tokens of the vocabulary, in float32."""
        model = self.model_runner.get_model()
        # vLLM computes log-probs of prompts at a temperature of 1 alone.
        plain = getattr(model, _PLAIN_LOGITS, model.compute_logits)
        setattr(model, _PLAIN_LOGITS, plain)
        model.compute_logits = partial(_scaled_logits, plain, temperature, vocabulary)

    def gleaner_load_adapter(self, folder: str) -> float:
        """Replace the adapter by that of a folder; returns the seconds."""
        began_s = time.perf_counter()
        self.add_lora(adapter_request(folder, replace=True))
        check_loaded(self.model_runner.lora_manager._adapter_manager)  # noqa: SLF001 - vLLM offers no other way
        return time.perf_counter() - began_s


def _scaled_logits(plain: Any, temperature: float, vocabulary: int, *given: Any, **named: Any) -> Any:
    logits = plain(*given, **named)
    if logits is None:  # this worker's part is with another
        return None
    logits = logits.float() / temperature
    logits[:, vocabulary:] = float("-inf")
    return logits


def end_with_owner(owner: int) -> None:
    """Kill the calling process and its parent as soon as process `owner` ends, and the caller alone if the parent ends.

    Otherwise vLLM would run for ever after the process that started it is killed, and would keep the GPU's memory.
    """
    if os.getpid() != owner:
        watched = {owner, os.getppid()}
        threading.Thread(target=_kill_after_any, args=(watched, owner), name="gleaner-owner", daemon=True).start()


def _kill_after_any(watched: set[int], owner: int) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid) for pid in watched], [], [])
    for pid in watched - {owner}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# At import, not at the first call, because loading the model before that takes minutes.
if OWNER in os.environ:
    end_with_owner(int(os.environ[OWNER]))
