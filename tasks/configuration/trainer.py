"""The section `trainer`: how the train task runs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from storage.fleet import fleet_layout

STRICT = ConfigDict(extra="forbid", strict=True)
Placement = Literal["own", "pod", "standing", "shared", "external"]
EXTERNAL: Placement = "external"
Offload = Literal["none", "optimizer"]


def _interval(value: object) -> object:
    """The value if it is an interval; raises ValueError with one line for both kinds."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("allowed: an integer of at least 1, or auto")


CheckpointInterval = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(_interval)]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the train task runs.

    Attributes:
        placement: Which machines record an iteration's groups. "own": pools.train, which follows the rollout from its
            beginning. "pod": pools.control, until the train phase is due; pools.train is held for little more than the
            phase, and is free for other runs meanwhile. "standing": pools.control to the end; a machine of pools.train
            stands for the whole execution and keeps the trainer's state in memory. "shared": pools.control to the end;
            a host of `fleet` trains the phases of several runs in turns, and the run itself holds no GPU for training.
            "external": a program with another trainer takes the groups and publishes weights (`gleaner.rollouts`).
        fleet: With placement "shared", the url of the fleet that has admitted the run (`gleaner fleet admit`).
        dtype: The dtype of forward and backward passes; what is trained, its gradients and
            moments are float32 in any case, except for moments of 8 bits.
        device: "auto" takes the first GPU, if any.
        micro_batch_tokens_max: The most tokens (prompt and response) of a micro-batch, with its padding, and of a pass.
            Micro-batches hold whole groups: a larger group is a micro-batch of its own, in several passes.
        gradient_checkpointing: Recompute the layers' activations in the backward pass.
        offload: "optimizer" keeps the optimizer's state in the host's memory between steps, with the same result.
        use_liger_kernel: Use the package liger-kernel's kernels in the policy's layers; see `tasks.learning.liger`.
            "auto": in bfloat16 on a GPU, where the package is installed, knows the model, and computes the same.
        compile_layers: Compile the models' layers (torch.compile), if a trial computes the same.
        group_timeout_s: How long the trainer waits without any new token in the journal before it gives up.
        checkpoint_interval: The trainer's state (parameters, moments) is stored every so many versions, and at the end
            of an execution; "auto": when replaying would cost more time than writing, as both were measured. A trainer
            that finds no state of the version before its own reads an older one, and trains on the recorded batches of
            the iterations since then again.
        nnodes: The number of machines that train together; more than one need Kubeflow's training operator.
        nproc_per_node: The number of processes on each machine, one per GPU. FSDP2 divides the model among all.
    """

    __pydantic_config__ = STRICT
    placement: Placement = "own"
    fleet: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    micro_batch_tokens_max: Annotated[int, Field(ge=1)] = 16384
    gradient_checkpointing: bool = False
    offload: Offload = "none"
    use_liger_kernel: Literal[True, False, "auto"] = "auto"
    compile_layers: bool = False
    group_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    checkpoint_interval: CheckpointInterval = 1
    nnodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    nproc_per_node: Annotated[int, Field(ge=1, le=1024)] = 1

    @property
    def trained_by_host(self) -> bool:
        """Whether a host trains, which keeps the state from phase to phase, instead of a task for each iteration."""
        return self.placement in ("standing", "shared")

    @property
    def is_external(self) -> bool:
        """Whether a program outside this project trains."""
        return self.placement == EXTERNAL

    def fleet_of(self, run_url: str) -> str | None:
        """The fleet whose hosts train the run at this url: `fleet`, or one of the run's own. None: no host trains."""
        return fleet_layout.standing(run_url) if self.placement == "standing" else self.fleet
