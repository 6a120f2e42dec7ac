"""The refusals of `plan` for a trainer's state too large for the GPUs, and doubts about the longest pass."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.model_config import model_fields
from resources.model_size import ModelSize, size_from_config
from storage.errors import WrongInputError
from storage.paths import expanded
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.planning.trainer_memory import Machine, doubted, misfit
from tasks.preparing.engine_fit import VALUE_BYTES, data_sheet


class TrainerMisfit(WrongInputError):  # noqa: N818 - reads as what is wrong
    """The trainer's parameters, gradients, moments and teachers do not fit its GPUs."""


def check_trainer_fits(config: RunConfig, model_dir: Path, teacher: TeacherConfig | None = None) -> list[str]:
    """Raise TrainerMisfit if the state alone cannot fit; returns a doubt if the activations of a pass hardly do.

    Trainers without GPUs, models whose size config.json does not tell, and GPUs without a data sheet are passed over.
    teacher: with local paths; a directory without a readable config.json is passed over, which `check_teachers`
    refuses. Raises ModelConfigError for a config.json of the policy that cannot be read.
    """
    pool, sheet = config.pools.train, data_sheet(config.pools.train)
    if not pool.gpus or sheet is None or config.trainer.device == "cpu":
        return []
    fields = model_fields(model_dir)
    try:
        size = size_from_config(fields, VALUE_BYTES[config.rollout.dtype])
    except ValueError:
        return []
    processes = config.trainer.nnodes * config.trainer.nproc_per_node
    machine = Machine(
        device_bytes=sheet.memory_bytes,
        processes=processes,
        stored_bytes=_stored_bytes(fields),
        teachers=() if teacher is None else tuple(_sizes(teacher)),
    )
    refusal = misfit(config, size, sheet, machine)
    if refusal is not None:
        raise TrainerMisfit(refusal)
    doubt = doubted(config, size, sheet, machine)
    return [] if doubt is None else [doubt]


def _sizes(teacher: TeacherConfig) -> Iterator[ModelSize]:
    for path in teacher.in_trainer.values():
        # ModelConfigError is a ValueError, too.
        with suppress(ValueError):
            yield size_from_config(model_fields(expanded(path)), VALUE_BYTES["bfloat16"])


def _stored_bytes(fields: dict[str, Any]) -> int:
    """Bytes per parameter of the model's files, by config.json; as bfloat16 without a dtype in config.json.

    float16 counts as float32: passes never run in float16, so frozen weights have float32 masters.
    """
    told = fields.get("dtype") or fields.get("torch_dtype")
    return {"float16": 4, "float32": 4}.get(told, 2) if isinstance(told, str) else 2
