"""What this process was granted: the CPU quota and memory limit of its control group, and the GPUs of its container.

A platform may cap a pod below what its pool asks for without a word, so tasks compare the two before they begin.
Linux only; elsewhere nothing is known.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from resources.pools import PoolConfig, pool_path
from resources.quantities import amount

log = logging.getLogger(__name__)
EXECUTION_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"
_GIB = 1 << 30
# Version 1 of control groups writes a number near 2^63 where there is no limit.
_NO_LIMIT = 1 << 60
_GPU = re.compile(r"nvidia[0-9]+")
# What a process needs without a model: the least of our containers, `iterations`, took 310 MB on a real backend.
_PROCESS_BYTES = 300 << 20


class MachineTooSmall(RuntimeError):  # noqa: N818 - reads as what happened
    """The pod was granted less memory than its work needs at the least."""


@dataclass(frozen=True, kw_only=True)
class Granted:
    """The resources of this container.

    Attributes:
        cpus: cores; None: no limit is known.
        memory_bytes: the limit; None: no limit is known.
        gpus: devices in the container.
    """

    cpus: float | None
    memory_bytes: int | None
    gpus: int

    def __str__(self) -> str:
        cpus = "CPUs without a quota" if self.cpus is None else f"{self.cpus:g} CPUs"
        memory = "memory without a limit" if self.memory_bytes is None else f"{self.memory_bytes / _GIB:.2f} GiB memory"
        return f"{cpus}, {memory}, {self.gpus} GPUs"


def is_in_a_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Flyte started this process on a cluster; a local run is granted nothing."""
    return environment.get(EXECUTION_VARIABLE, "local") not in ("", "local")


def granted(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Granted:
    """What this process may use. root: where proc, sys and dev lie."""
    quotas = [float(quota) / float(period) for quota, period in _cpu_limits(root)]
    limits = [limit for limit in _numbers(root, "memory", "memory.max", "memory.limit_in_bytes") if limit < _NO_LIMIT]
    gpus = sum(_GPU.fullmatch(entry.name) is not None for entry in (root / "dev").glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([each for each in visible.split(",") if each.strip() not in ("", "-1", "NoDevFiles")]))
    return Granted(cpus=min(quotas, default=None), memory_bytes=min(limits, default=None), gpus=gpus)


def memory_peak(root: Path = Path("/")) -> tuple[int | None, int]:
    """(Most bytes that the container has used, how many of its processes the kernel killed for memory)."""
    peaks = list(_numbers(root, "memory", "memory.peak", "memory.max_usage_in_bytes"))
    killed = 0
    for folder in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", _text(folder / name), flags=re.MULTILINE)
            killed = max(killed, int(found[1]) if found else 0)
    return max(peaks, default=None), killed


def compared(pool_name: str, pool: PoolConfig, found: Granted, needed_bytes: int, needed_for: str) -> str:
    """A line with the granted resources and the resources that the pool asks for.

    needed_bytes: host memory that `needed_for` takes at the least. Raises MachineTooSmall.
    """
    path = pool_path(pool_name)
    asked = f"{path} asks for cpu {pool.cpu}, memory {pool.memory}, gpus {pool.gpus}"
    least = needed_bytes + _PROCESS_BYTES
    if found.memory_bytes is not None and found.memory_bytes < least:
        raise MachineTooSmall(
            f"{path}.memory: value {pool.memory}; this pod is limited to {found.memory_bytes / _GIB:.2f} GiB, and "
            f"{needed_for} takes at least {least / _GIB:.2f} GiB. Raise the field, and the memory limit of Flyte's "
            "task_resources if that is lower"
        )
    less = [
        name
        for name, limit, wanted in (("cpu", found.cpus, pool.cpu), ("memory", found.memory_bytes, pool.memory))
        # Quotas are whole microseconds of a period.
        if limit is not None and limit < 0.99 * float(amount(wanted))
    ]
    capped = f"; LESS {' and '.join(less)} than asked for: see Flyte's task_resources limits" if less else ""
    return f"granted {found}; {asked}{capped}"


def check_granted(
    what: str, pool_name: str, pool: PoolConfig, needed_bytes: Callable[[], int], needed_for: str
) -> None:
    """In a pod, log the resources granted to `what` beside the pool's request; raises MachineTooSmall."""
    if is_in_a_pod():
        line = compared(pool_name, pool, granted(), needed_bytes(), needed_for)
        log.log(logging.WARNING if "LESS" in line else logging.INFO, "%s: %s", what, line)


def _cpu_limits(root: Path) -> Iterator[tuple[str, str]]:
    for folder in _groups(root, "cpu"):
        both = _text(folder / "cpu.max").split()
        if not both:
            both = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(both) == 2 and all(each.isdecimal() for each in both):
            yield both[0], both[1]


def _numbers(root: Path, controller: str, *names: str) -> Iterator[int]:
    for folder in _groups(root, controller):
        for name in names:
            text = _text(folder / name).strip()
            if text.isdecimal():
                yield int(text)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of the groups around it, in either version."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A folder of several controllers may name them in another order; then each has a link to it.
        names = (controllers, controller) if controllers and controllers != controller else (controllers,)
        for top in (root / "sys/fs/cgroup" / name for name in names):
            own = top / path.lstrip("/")
            # In a container the path may be that of the host; then the top is the container's own group.
            yield from (folder for folder in (own, *own.parents) if folder == top or top in folder.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
