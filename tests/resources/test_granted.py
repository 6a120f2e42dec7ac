import os
import subprocess
import sys

import pytest

from resources.granted import MachineTooSmall, compared, granted, is_in_a_pod, memory_peak
from resources.pools import PoolConfig, RolloutPoolConfig

GIB = 1 << 30


def machine(root, files, gpus=0):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for number in range(gpus):
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev" / f"nvidia{number}").touch()
    for name in ("nvidiactl", "nvidia-uvm") if gpus else ():
        (root / "dev" / name).touch()
    return root


VERSION_2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cpu.max": "350000 100000\n",
    "sys/fs/cgroup/memory.max": f"{12 * GIB}\n",
    "sys/fs/cgroup/memory.peak": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory.events": "low 0\noom 2\noom_kill 1\n",
}


def test_a_container_of_version_2(tmp_path):
    found = granted(machine(tmp_path, VERSION_2, gpus=2), {})
    assert (found.cpus, found.memory_bytes, found.gpus) == (3.5, 12 * GIB, 2)
    assert memory_peak(tmp_path) == (3 * GIB, 1)


def test_the_tightest_group_around_the_process_counts(tmp_path):
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1\n",
        "sys/fs/cgroup/kubepods/pod1/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "max 100000\n",
        "sys/fs/cgroup/kubepods/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
    }
    found = granted(machine(tmp_path, files), {})
    assert (found.cpus, found.memory_bytes, found.gpus) == (None, GIB, 0)


def test_controllers_in_another_order_than_their_folder(tmp_path):
    files = {
        "proc/self/cgroup": "3:cpuacct,cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert granted(machine(tmp_path, files), {}).cpus == 1.5


def test_a_container_of_version_1_whose_path_is_that_of_the_host(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/kubepods/x\n3:cpu,cpuacct:/kubepods/x\n0::/ignored\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.max_usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    found = granted(machine(tmp_path, files), {})
    assert (found.cpus, found.memory_bytes) == (2.0, 4 * GIB)
    assert memory_peak(tmp_path) == (GIB, 3)


def test_no_limit(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    found = granted(machine(tmp_path, files), {})
    assert (found.cpus, found.memory_bytes) == (None, None)
    assert str(found) == "CPUs without a quota, memory without a limit, 0 GPUs"


@pytest.mark.parametrize(("visible", "gpus"), [("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("GPU-1,GPU-2,GPU-3", 2)])
def test_hidden_gpus_do_not_count(tmp_path, visible, gpus):
    assert granted(machine(tmp_path, {}, gpus=2), {"CUDA_VISIBLE_DEVICES": visible}).gpus == gpus


def test_a_machine_without_these_files(tmp_path):
    assert str(granted(tmp_path, {})) == "CPUs without a quota, memory without a limit, 0 GPUs"
    assert memory_peak(tmp_path) == (None, 0)


def test_this_machine_says_something():
    assert granted().gpus >= 0


def test_the_line_says_what_was_granted_and_what_is_less_than_asked_for(tmp_path):
    found = granted(machine(tmp_path, VERSION_2), {})
    pool = RolloutPoolConfig(cpu="3500m", memory="12Gi")
    line = compared("far", pool, found, 0, "nothing")
    assert line == (
        "granted 3.5 CPUs, 12.00 GiB memory, 0 GPUs; pools.more_rollout.far asks for cpu 3500m, memory 12Gi, gpus 0"
    )
    assert "LESS cpu than" in compared("far", RolloutPoolConfig(cpu="4", memory="1Gi"), found, 0, "nothing")
    assert "LESS cpu and memory than" in compared("train", PoolConfig(cpu="4", memory="13Gi"), found, 0, "nothing")


def test_gpus_are_said_and_not_judged_because_the_devices_of_a_container_may_be_unusable(tmp_path):
    found = granted(machine(tmp_path, VERSION_2, gpus=1), {})
    line = compared("train", PoolConfig(gpus=2), found, 0, "nothing")
    assert line.startswith("granted 3.5 CPUs, 12.00 GiB memory, 1 GPUs; ")
    assert "gpus 2" in line


def test_memory_in_which_the_work_cannot_fit_is_refused(tmp_path):
    found = granted(machine(tmp_path, VERSION_2), {})
    assert compared("rollout", RolloutPoolConfig(), found, 11 * GIB, "the weights")
    with pytest.raises(
        MachineTooSmall, match=r"^pools\.rollout\.memory: .* limited to 12\.00 GiB, and the weights takes"
    ):
        compared("rollout", RolloutPoolConfig(), found, 12 * GIB, "the weights")


def test_only_a_pod_was_granted_anything():
    assert not is_in_a_pod({})
    assert not is_in_a_pod({"FLYTE_INTERNAL_EXECUTION_ID": "local"})
    assert is_in_a_pod({"FLYTE_INTERNAL_EXECUTION_ID": "abc123"})


@pytest.mark.parametrize("execution", ["local", "abc123"])
def test_a_pod_logs_one_line(execution):
    code = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s');"
        "from resources.granted import check_granted; from resources.pools import PoolConfig;"
        "check_granted('slot 3 of iteration 7', 'train', PoolConfig(), lambda: 0, 'nothing')"
    )
    environment = {**os.environ, "FLYTE_INTERNAL_EXECUTION_ID": execution}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    lines = done.stderr.splitlines()
    assert len(lines) == (0 if execution == "local" else 1)
    assert all(line.startswith("slot 3 of iteration 7: granted ") for line in lines)
