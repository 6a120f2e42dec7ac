"""The configuration of a model directory as transformers reads it, and as engines and trainer alike compute with it.

Dropout and noise are switched off, because random numbers would make the ratio to the sampling policy random, and
resumed training different from uninterrupted training.
"""

from pathlib import Path
from typing import Any

from storage.errors import WrongInputError


class ModelConfigurationError(WrongInputError):
    """The directory has no config.json, or transformers does not understand it; one line."""


def read_model_config(model_dir: Path) -> Any:
    """The transformers configuration in a model directory, without dropout and noise; ModelConfigurationError."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    if not (model_dir / "config.json").is_file():
        raise ModelConfigurationError(f"{str(model_dir)!r} holds no config.json; allowed: a Hugging Face directory")
    try:
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - each class checks its fields by rules and with errors of its own
        reason = " ".join(str(error).split())
        raise ModelConfigurationError(f"{str(model_dir / 'config.json')!r} is not understood: {reason}") from None
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if ("drop" in name and isinstance(value, float)) or ("jitter" in name and is_number):
                setattr(part, name, 0.0)
    # One product for each expert: in grouped products the rounding of a token depends on the others in the batch.
    config._experts_implementation = "eager"  # noqa: SLF001 - sets it in every part, as from_config does by its argument
    return config


def _parts(config: Any) -> list[Any]:
    """A configuration and the configurations within it, at any depth."""
    from transformers import PretrainedConfig  # noqa: PLC0415 - takes seconds

    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(part for value in inner for part in _parts(value))]
