"""A GPU pool's machine, whose torch sees no GPU, another number, or a driver too old for its CUDA."""

import ctypes
from pathlib import Path

import pytest

from tasks.device.gpu_check import OLDEST_DRIVERS, WrongGpus, WrongNode, check_gpus
from tasks.device.visible_gpus import VisibleGpus, seen_by, visible_gpus

OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)\nGCC 12\n"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


class Torch:
    """What torch.cuda says on a machine."""

    def __init__(self, count, *, usable=True):
        self._count, self._usable = count, usable

    def is_available(self):
        return self._usable and self._count > 0

    def device_count(self):
        return self._count


class Library:
    """The driver's library; 12020 is CUDA 12.2."""

    def __init__(self, number, status=0):
        self._number, self._status = number, status

    def cuDriverGetVersion(self, target):  # noqa: N802 - the driver's name
        ctypes.cast(target, ctypes.POINTER(ctypes.c_int)).contents.value = self._number
        return self._status


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


def machine(tmp_path, torch, *, built_for="13.0", module=OPEN_MODULE, load=lambda _: Library(13000)):
    """What is seen on a machine with this torch, driver and library."""
    file = tmp_path / "version"
    if module is not None:
        file.write_text(module)
    return seen_by(torch, "2.13.0", built_for, module=file, load=load)


def refusal(seen, gpus=1, device="auto"):
    with pytest.raises(WrongGpus) as refused:
        check_gpus("pools.rollout", gpus, device, lambda: seen)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_driver_and_cuda_are_read_from_both_kinds_of_kernel_module(tmp_path):
    seen = machine(tmp_path, Torch(1))
    assert (seen.count, seen.driver, seen.driver_cuda, seen.cuda) == (1, "580.95.05", "13.0", "13.0")
    seen = machine(tmp_path, Torch(1, usable=False), module=CLOSED_MODULE, load=lambda _: Library(12020))
    assert (seen.count, seen.driver, seen.driver_cuda) == (0, "535.104.05", "12.2")


@pytest.mark.parametrize("load", [no_library, lambda _: Library(0), lambda _: Library(13000, status=3)])
def test_a_driver_that_is_not_there_or_says_nothing_is_none(tmp_path, load):
    seen = machine(tmp_path, Torch(0), module=None, load=load)
    assert (seen.driver, seen.driver_cuda) == (None, None)


@pytest.mark.parametrize(("cuda", "driver_cuda", "too_old"), [
    ("13.0", "12.9", True), ("13.0", "13.0", False), ("13.2", "13.0", False), ("12.8", "13.0", False),
    ("9.2", "10.1", False), ("10.1", "9.2", True), (None, "12.2", False), ("13.0", None, False),
])  # fmt: skip
def test_a_driver_runs_every_cuda_of_its_major_number_and_older_ones(cuda, driver_cuda, too_old):
    seen = VisibleGpus(count=0, torch="2", cuda=cuda, driver=None, driver_cuda=driver_cuda, image=None)
    assert seen.is_driver_too_old == too_old


def test_as_many_gpus_as_the_pool_has_are_accepted(tmp_path):
    eight = machine(tmp_path, Torch(8))
    check_gpus("pools.train", 8, "auto", lambda: eight)
    check_gpus("pools.train", 8, "cuda", lambda: eight)
    assert refusal(eight, gpus=7)


@pytest.mark.parametrize(("gpus", "device"), [(0, "auto"), (0, "cuda"), (1, "cpu")])
def test_where_no_gpu_is_asked_for_the_machine_is_not_looked_at(gpus, device):
    check_gpus("pools.rollout", gpus, device, lambda: pytest.fail("torch is imported for nothing"))


def test_a_driver_too_old_is_refused_with_driver_cuda_and_image(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_IMAGE", "ghcr.io/example/gleaner:0.1.0")
    old = machine(tmp_path, Torch(1, usable=False), module=CLOSED_MODULE, load=lambda _: Library(12020))
    assert refusal(old) == (
        "pools.rollout.gpus: value 1, and torch sees no GPU (driver 535.104.05 for CUDA 12.2, torch 2.13.0 for CUDA "
        "13.0, image ghcr.io/example/gleaner:0.1.0); the driver is too old for this torch; allowed: driver 580 or "
        "newer, or an image with torch for an older CUDA"
    )


def test_each_reason_for_no_gpu_has_its_own_remedy(tmp_path):
    assert "allowed: an image whose torch is built for CUDA" in refusal(machine(tmp_path, Torch(0), built_for=None))
    bare = machine(tmp_path / "bare", Torch(0), module=None, load=no_library)
    assert "no NVIDIA driver here" in refusal(bare)
    capped = refusal(machine(tmp_path, Torch(0), load=no_library))
    assert "the node has a driver, and this container was given no GPU" in capped
    assert "a higher gpu limit of Flyte's task_resources" in capped
    assert "was given its GPUs" in refusal(machine(tmp_path, Torch(0)))
    unknown = machine(tmp_path, Torch(0), built_for="14.0", load=lambda _: Library(13000))
    assert "allowed: a driver for CUDA 14, or" in refusal(unknown)


@pytest.mark.parametrize(
    ("count", "gpus", "ways"),
    [
        (8, 1, "or as many in CUDA_VISIBLE_DEVICES as the pool says"),
        (1, 8, "a higher gpu limit of Flyte's task_resources, or a node whose GPUs all work"),
    ],
)
def test_another_number_of_gpus_is_refused(tmp_path, count, gpus, ways):
    line = refusal(machine(tmp_path, Torch(count)), gpus)
    assert line.startswith(f"pools.rollout.gpus: value {gpus}, and torch sees {count} GPUs (driver 580.95.05")
    assert line.endswith(f"allowed: pools.rollout.gpus: {count}, {ways}")


@pytest.mark.parametrize(("built_for", "kind"), [("13.0", WrongNode), (None, WrongGpus)])
def test_an_image_without_cuda_is_the_same_on_every_node(tmp_path, built_for, kind):
    with pytest.raises(WrongGpus) as refused:
        check_gpus("pools.train", 1, "auto", lambda: machine(tmp_path, Torch(0), built_for=built_for))
    assert type(refused.value) is kind


def test_this_machine_can_be_looked_at():
    import torch  # noqa: PLC0415 - as the code does

    seen = visible_gpus()
    assert seen.torch == torch.__version__
    assert seen.count == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_the_guide_names_the_oldest_driver_of_each_cuda():
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "first_run.md").read_text(encoding="utf-8")
    assert all(driver in guide for driver in OLDEST_DRIVERS.values())
