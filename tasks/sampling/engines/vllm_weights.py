"""VllmWeights: the weight version that a running vLLM holds, and its update as a whole, by patches or as an adapter."""

import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from storage.weights.adapters import BASE_VERSION
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.adapted_weights import AdaptedWeights
from tasks.sampling.engines.decoder import matched_weights, torch_weights
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.patched_weights import PatchedWeights
from tasks.sampling.engines.vllm_adapter import adapter_request, check_adapter, write_adapter
from tasks.sampling.engines.vllm_core import Core, WorkerCall
from tasks.sampling.engines.vllm_handover import handed
from tasks.sampling.engines.vllm_patch import INDICES, VALUES

log = logging.getLogger(__name__)
VERIFY_INTERVAL = 50  # patches; after the first of an engine, and after each of these, weights are loaded whole, too


class VllmWeights:
    """The weights in vLLM. `version` is None while there are none; `adapter` is vLLM's request for the loaded one.

    `takes_patches` is false as soon as it is known that every version must be loaded whole.
    """

    def __init__(self, module: Any, folder: Path, config: VllmConfig) -> None:
        """module: the model's Hugging Face class, on meta. folder: for adapters, which vLLM reads from files."""
        self.version: int | None = None
        self.adapter: Any = None
        self._module = module
        self._folder = folder / "adapter"
        self._rank_max = config.max_lora_rank
        self._is_here = _is_here(config)
        self._holds_base = False
        self.takes_patches = config.quantization is None and config.max_lora_rank is None
        self._patches = 0

    def forget(self) -> None:
        """Vllm has ended."""
        self.version, self.adapter, self._holds_base, self._patches = None, None, False, 0

    def load(self, core: Core, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        """Replace the weights; EngineError, with the old ones in place, if the new ones are not the model's.

        Raises EngineDied if vLLM must be ended, because it holds no version any more.
        """
        if isinstance(tensors, AdaptedWeights) and self._rank_max is not None:
            check_adapter(tensors.adapter, self._rank_max)
            if not self._holds_base:
                self._load_whole(core, BASE_VERSION, tensors.base())
            self._load_adapter(core, version, tensors)
        elif not (isinstance(tensors, PatchedWeights) and self._load_patches(core, version, tensors)):
            self._load_whole(core, version, tensors)

    def _load_whole(self, core: Core, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        blocks = {name: tensors[stored] for name, stored in self._sources(version, tensors).items()}
        self.version, self.adapter, self._holds_base = None, None, False
        try:
            with handed(blocks, here=self._is_here) as given:
                results = core.load(WorkerCall("gleaner_load", (given,)), str(version))
        except (OSError, MemoryError) as error:
            raise EngineDied(f"weights {version} cannot be handed to vLLM: {error}") from error
        self.version, self._holds_base = version, version == BASE_VERSION
        log.info("weights %d in vLLM: %.2f s to load", version, max(results))

    def _load_patches(self, core: Core, version: int, weights: PatchedWeights) -> bool:
        """Change the weights where they differ; False if they must be loaded whole, also because a patch failed."""
        if not self.takes_patches or weights.base != self.version:
            return False
        sources, patches = self._sources(version, weights), weights.patches()
        if patches is None:
            return False
        changed = {name: patches[stored] for name, stored in sources.items() if stored in patches}
        parts = {name + INDICES: each.indices for name, each in changed.items()}
        parts |= {name + VALUES: each.values for name, each in changed.items()}
        shapes = {name: list(each.shape) for name, each in changed.items()}
        blocks = {name: weights[stored] for name, stored in sources.items()}
        is_verified = self._patches % VERIFY_INTERVAL == 0
        self.version = None
        try:
            with ExitStack() as stack:
                given = stack.enter_context(handed(parts, here=self._is_here))
                whole = stack.enter_context(handed(blocks, here=self._is_here)) if is_verified else None
                results = core.load(WorkerCall("gleaner_patch", (shapes, given, whole)), str(version))
        except (OSError, MemoryError) as error:
            log.warning("weights %d: %s; they are loaded whole", version, error)
            return False
        if reasons := [reason for reason in results if isinstance(reason, str)]:
            log.warning("weights %d: %s; this engine loads every version whole", version, reasons[0])
            self.takes_patches = False
            return False
        self.version = version
        self._patches += 1
        num_bytes = sum(block.num_bytes for block in parts.values())
        also = ", and found to be as the whole" if is_verified else ""
        log.info("weights %d in vLLM: %.2f s to change %d bytes%s", version, max(results), num_bytes, also)
        return True

    def _load_adapter(self, core: Core, version: int, weights: AdaptedWeights) -> None:
        self.version = None
        try:
            write_adapter(weights.adapter, self._folder)
            results = core.load(WorkerCall("gleaner_load_adapter", (str(self._folder),)), str(version))
        except (OSError, MemoryError, SafetensorError) as error:
            raise EngineDied(f"weights {version}: {self._folder} cannot be written: {error}") from error
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.version, self.adapter = version, adapter_request(str(self._folder), replace=False)
        log.info("adapter %d in vLLM: %.2f s to load", version, max(results))

    def _sources(self, version: int, tensors: Mapping[str, TensorBlock]) -> dict[str, str]:
        return _names_in_vllm(self._module, version, tensors)


def load_draft_model(core: Core, module: Any, tensors: Mapping[str, TensorBlock], config: VllmConfig) -> None:
    """Give vLLM's draft model its weights, for an engine that has started; module: its class, on meta.

    Raises EngineError if the tensors are not the model's, and EngineDied.
    """
    blocks = {name: tensors[stored] for name, stored in _names_in_vllm(module, BASE_VERSION, tensors).items()}
    try:
        with handed(blocks, here=_is_here(config)) as given:
            core.call(WorkerCall("gleaner_load_draft_model", (given,)))
    except (OSError, MemoryError) as error:
        raise EngineDied(f"the draft model cannot be handed to vLLM: {error}") from error


def _is_here(config: VllmConfig) -> bool:
    """Whether the one worker is in this process, and takes tensors as they are."""
    return config.process == "same" and config.tensor_parallel_size == 1


def _names_in_vllm(module: Any, version: int, tensors: Mapping[str, TensorBlock]) -> dict[str, str]:
    """The names by which vLLM gets tensors, each with the stored name: their own, and all names of tied ones."""
    given = torch_weights(version, tensors)
    names = matched_weights(module, given)
    return {name: name for name in given if name not in names.passed_over} | names.other_names
