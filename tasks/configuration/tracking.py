"""The section `tracking`: where else a run's metrics go."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

# A backend has the name of its module; the name for pip may differ.
DISTRIBUTIONS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The trackers that get every iteration's metrics; credentials come from the environment only.

    Attributes:
        backends: none, one or several, each once.
        project: W&B's project, MLflow's experiment.
        name: the run's name in the trackers. None: the last part of the run's url.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    backends: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    project: Annotated[str, Field(min_length=1)] = "gleaner"
    name: Annotated[str, Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if len(set(self.backends)) < len(self.backends):
            raise ValueError(f"backends: value {list(self.backends)}; allowed: each at most once")

    def check_libraries(self) -> None:
        """Raises ValueError, which names the first backend whose library is not installed, and how to install it."""
        for backend in self.backends:
            spec = find_spec(backend)
            # find_spec also finds a folder without __init__.py: W&B leaves one called wandb where it worked.
            if spec is None or spec.origin is None:
                raise ValueError(
                    f"tracking.backends: value {backend!r}; its library is not installed here: "
                    f"pip install {DISTRIBUTIONS[backend]}"
                )
