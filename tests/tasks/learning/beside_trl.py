"""What the comparisons with TRL's trainers share: the version, and a policy with the weights of TRL's model."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.policy import Policy

TRL = "1.16.0"
# Of the configuration of each trainer: one batch on the CPU, with nothing that changes its gradient.
ARGUMENTS = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "max_length": None,
    "average_tokens_across_devices": False,
}


def needs_trl() -> None:
    """Skip a test where TRL is not installed in the pinned version."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = "none"
    if found != TRL:
        pytest.skip(f"needs trl {TRL} (found: {found})")


def policy_of(folder: Path, model: Any, **arguments: Any) -> Policy:
    """Our policy, in float64, with the weights of a model of transformers; arguments as of `Policy`."""
    model.config.save_pretrained(folder)
    tensors = {name: value.detach().float() for name, value in model.state_dict().items()}
    policy = Policy(folder, tensors, TrainerConfig(device="cpu"), **arguments)
    policy.module.double()
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            parameter.copy_(model.get_parameter(name))
    return policy
