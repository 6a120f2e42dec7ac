"""The meaning of PEFT's LoraConfig, and of TRL's words for adapters, in a run."""

import math
from typing import Any

from tasks.adopting.adoption import Adoption
from tasks.adopting.trl_defaults import LORA

# Ours are the plain adapters of arXiv 2106.09685.
_REASONS = {
    "lora_dropout": "Gleaner's adapters have no dropout",
    "lora_modules_to_save": "the adapters alone are trained, no module beside them",
    "lora_target_parameters": "adapters are for linear layers, named in lora.target_modules",
    "use_dora": "Gleaner has no DoRA",
    "LoraConfig.bias": "no bias is trained",
    "LoraConfig.init_lora_weights": "adapters begin as PEFT's default has it, B at 0",
    "LoraConfig.rank_pattern": "all adapters have the rank lora.rank",
    "LoraConfig.alpha_pattern": "all adapters have lora.alpha",
    "LoraConfig.layers_to_transform": "the layers of lora.target_modules get an adapter wherever they stand",
    "LoraConfig.exclude_modules": "name the layers that get an adapter in lora.target_modules",
}
_PLAIN: dict[str, Any] = {
    "lora_dropout": 0,
    "lora_modules_to_save": None,
    "lora_target_parameters": None,
    "use_dora": False,
}
_LAYERS = "lora.target_modules"


def carry_over(adoption: Adoption) -> None:
    """Decide about the settings of adapters."""
    is_object = adoption.has("peft_config")
    if not adoption.is_known("peft_config", "use_peft"):
        for field in ("lora.rank", "lora.alpha", _LAYERS):
            adoption.leave_open(field, "TRL's trainer gets a peft_config that is not known")
    elif not is_object and adoption.value("use_peft") is not True:
        for name in ("lora_r", "lora_alpha", "lora_target_modules", *_PLAIN, "use_rslora", "lora_task_type"):
            adoption.leave(name, "use_peft is not true, so it has no effect")
        return
    adoption.ignore("peft_config", "use_peft")
    _scale(adoption, *((8, 8) if is_object else (16, 32)))
    _layers(adoption)
    if not is_object and not adoption.has("lora_dropout"):
        adoption.note("lora_dropout (0.05 by default)", _REASONS["lora_dropout"])
    for name, plain in (_PLAIN | LORA).items():
        if adoption.has(name) and adoption.value(name) in (plain, None, []):
            adoption.ignore(name)
        adoption.leave(name, _REASONS.get(name, "Gleaner's adapters have no such setting"))
    if adoption.value("lora_task_type", "CAUSAL_LM") in ("CAUSAL_LM", None):
        adoption.ignore("lora_task_type")
    adoption.leave("lora_task_type", "the policy is a causal language model")


def _scale(adoption: Adoption, rank_default: int, alpha_default: int) -> None:
    """The difference is multiplied by alpha / rank here, and by alpha / sqrt(rank) with use_rslora."""
    rank, alpha = adoption.count("lora_r", rank_default), adoption.number("lora_alpha", alpha_default)
    stabilised = adoption.flag("use_rslora", default=False)
    adoption.carry("lora.rank", rank, "lora_r")
    names = ("lora_alpha", "use_rslora", "lora_r") if stabilised else ("lora_alpha", "use_rslora")
    if stabilised and rank > 0:
        scaled = alpha * math.sqrt(rank)
        adoption.convert("use_rslora", f"lora.alpha is {scaled:g}, {alpha:g} times the root of the rank {rank}")
        alpha = scaled
    adoption.carry("lora.alpha", float(alpha), *names)


def _layers(adoption: Adoption) -> None:
    """Names of layers; a text is a regular expression there, except for all-linear."""
    name = "lora_target_modules"
    given = adoption.value(name)
    if given in ("all-linear", ["all-linear"]):
        adoption.carry(_LAYERS, [], name)
    elif isinstance(given, list) and given:
        adoption.carry(_LAYERS, given, name)
    elif given:
        adoption.refuse(name, "it is a regular expression; allowed: names of layers, or all-linear", _LAYERS)
    else:
        adoption.ignore(name)
        known = "PEFT's choice for your model, such as [q_proj, v_proj] for Llama and Qwen; [] for all linear layers"
        adoption.leave_open(_LAYERS, known)
