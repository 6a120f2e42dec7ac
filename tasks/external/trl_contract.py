"""What both trainers of TRL need of a run: equal settings, and log-probs for each token."""

from typing import Any

from storage.errors import WrongInputError
from tasks.configuration.run_config import RunConfig
from tasks.external.groups import Response


class TrlMisfit(WrongInputError):  # noqa: N818 - reads as what happened
    """A setting of TRL's trainer differs from the run's, or cannot be used with it."""


def same_settings(theirs: Any, config: RunConfig) -> None:
    """Raise TrlMisfit for a setting that TRL and the run both have, with another value.

    theirs: An object with TRL's num_generations, max_completion_length and temperature.
    """
    ours = {
        "num_generations": ("run.num_generations", config.run.num_generations),
        "max_completion_length": ("sampling.max_completion_length", config.sampling.max_completion_length),
        "temperature": ("sampling.temperature", config.sampling.temperature),
    }
    for name, (field, allowed) in ours.items():
        if (value := getattr(theirs, name)) != allowed:
            raise TrlMisfit(f"{name}: value {value} in TRL's configuration; allowed with {field} {allowed}: {allowed}")


def aligned_logprobs(response: Response) -> list[float]:
    """The log-prob of each token of a response; 0 at tokens that an environment added."""
    sampled = iter(response.logprobs.tolist())
    return [next(sampled) if own else 0.0 for own in response.policy_mask]
