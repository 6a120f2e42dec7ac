"""Refuses a machine whose GPUs differ from the pool's, before a process silently computes on the CPU."""

from collections.abc import Callable

from storage.errors import GleanerError
from tasks.device.visible_gpus import VisibleGpus, visible_gpus

# The oldest driver of each major release of CUDA (NVIDIA, "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVERS = {"12": "525", "13": "580"}


# What caps a pod's GPUs without a word.
_CAP = "a higher gpu limit of Flyte's task_resources"


class WrongGpus(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """The machine of a pool has other GPUs than the pool says, or torch cannot use them."""


class WrongNode(WrongGpus):
    """The node has wrong GPUs, and another node may have the right GPUs."""


def check_gpus(path: str, gpus: int, device: str, see: Callable[[], VisibleGpus] = visible_gpus) -> None:
    """Raise WrongGpus unless torch sees as many GPUs as the pool at `path` of the configuration has.

    The error is a WrongNode unless the image is to blame, which is equal on every node.

    Args:
        path: For example "pools.train".
        gpus: The pool's number of GPUs; 0 asks for nothing.
        device: The device that the configuration names; "cpu" asks for nothing either.
        see: Looks at this machine.
    """
    if not gpus or device == "cpu":
        return
    seen = see()
    if seen.count == gpus:
        return
    found = f"torch sees {seen.count} GPUs" if seen.count else "torch sees no GPU"
    kind = WrongGpus if seen.cuda is None else WrongNode
    raise kind(f"{path}.gpus: value {gpus}, and {found} ({seen}); {_remedy(path, gpus, seen)}")


def _remedy(path: str, gpus: int, seen: VisibleGpus) -> str:
    """The cause, as far as known, and the cure."""
    if seen.count:
        hide, more = "or as many in CUDA_VISIBLE_DEVICES as the pool says", f"{_CAP}, or a node whose GPUs all work"
        return f"allowed: {path}.gpus: {seen.count}, {hide if seen.count > gpus else more}"
    if seen.cuda is None:
        return "allowed: an image whose torch is built for CUDA"
    if seen.driver_cuda is None and seen.driver is not None:
        return f"the node has a driver, and this container was given no GPU; allowed: {_CAP}, or NVIDIA's device plugin"
    if seen.driver_cuda is None:
        return "there is no NVIDIA driver here; allowed: a node with one, and NVIDIA's device plugin"
    if seen.is_driver_too_old:
        major = seen.cuda.partition(".")[0]
        oldest = OLDEST_DRIVERS.get(major)
        wanted = f"driver {oldest} or newer" if oldest else f"a driver for CUDA {major}"
        return f"the driver is too old for this torch; allowed: {wanted}, or an image with torch for an older CUDA"
    return f"allowed: a container that was given its GPUs (NVIDIA's container toolkit, CUDA_VISIBLE_DEVICES), or {_CAP}"
