"""What a part of benchmarks.gpu that hangs or breaks down costs: its own time, and nothing that was measured."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.arm import Arm, ArmError, start_phases
from benchmarks.gpu.part import PARTS, Part, run_part
from benchmarks.gpu.schedule import run_in_turn
from benchmarks.gpu.sizes import size_for

SMALL = size_for("cpu", "0.5b", small=True)
# The output of a start of vLLM 0.32.0, without what is of no interest here.
LOG = [
    (0.5, "INFO [importing.py:68] Triton not installed"),
    (6.0, "gleaner: vLLM is imported"),
    (7.5, "INFO [model.py:598] Resolved architecture: Qwen2ForCausalLM"),
    (26.0, "(EngineCore pid=7) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'"),
    (30.0, "(EngineCore pid=7) INFO [model_runner.py:391] Loading model from scratch..."),
    (33.0, "(EngineCore pid=7) INFO [model_runner.py:424] Model loading took 0.92 GiB memory and 2.9 seconds"),
    (45.0, "(EngineCore pid=7) INFO [monitor.py:60] torch.compile took 11.20 s in total"),
    (47.0, "(EngineCore pid=7) INFO [monitor.py:90] Initial profiling/warmup run took 1.70 s"),
    (48.0, "(EngineCore pid=7) INFO [kv_cache_utils.py:2327] GPU KV cache size: 1,002,496 tokens"),
    (58.0, "(EngineCore pid=7) INFO [model_runner.py:1127] Graph capturing finished in 9 secs, took 0.5 GiB"),
    (58.1, "(EngineCore pid=7) INFO [core.py:385] init engine (profile, create kv cache, warmup model) took 25 s"),
    (60.0, "gleaner: the engine has started"),
]


def named(monkeypatch, **places):
    for name, place in places.items():
        monkeypatch.setitem(PARTS, name, Part(f"tests.benchmarks.failing_parts:{place}", 1, ()))


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


class Watched:
    """A standard output that notes when each line was written."""

    def __init__(self):
        self.lines = []

    def write(self, text):
        self.lines += [(time.monotonic(), line) for line in text.splitlines() if line]

    def flush(self):
        pass


@pytest.mark.slow
def test_parts_that_hang_crash_and_break_down_cost_their_own_time_alone_and_keep_their_figures(monkeypatch):
    named(monkeypatch, head="hangs", handover="crashes", noise="breaks_down", start="floods")
    parts = {"head": 0.25, "handover": 0.5, "noise": 0.5, "start": 0.5}
    printed, ended_s = Watched(), {}
    monkeypatch.setattr(sys, "stdout", printed)

    def run(part, limit_s):
        outcome = run_part(part, SMALL, "0.5b", limit_s)
        ended_s[part] = time.monotonic()
        return outcome

    outcomes = run_in_turn(2, parts, run, lambda *_: None)
    assert {part: outcome.status for part, outcome in outcomes.items()} == {
        "head": "failed",
        "handover": "failed",
        "noise": "failed",
        "start": "measured",
    }
    assert outcomes["head"].figures["chosen"] == 4096
    assert outcomes["head"].reason.startswith("not done after 15 s: child ")
    assert not lives(outcomes["head"].figures["child"])
    assert outcomes["handover"].figures == {"chosen": 2048}
    assert outcomes["handover"].reason.startswith("exit status -9")
    assert outcomes["noise"].figures == {}
    assert outcomes["noise"].reason == "exit status 1: RuntimeError: no such kernel"
    # The figure of the part that hangs is printed at once, not at the end of its part, and each only once.
    [(printed_s, line)] = printed.lines
    assert line == "## head: head, logits a chunk that the trainer takes, value 4096"
    assert ended_s["head"] - printed_s > 1.0


def test_a_start_is_broken_down_by_what_its_log_says():
    phases = start_phases(LOG)
    assert phases == {
        "import": 6.0,
        "settings and processes": 20.0,
        "worker": 4.0,
        "load": 3.0,
        "compile": 12.0,
        "first pass": 2.0,
        "key-value cache": 1.0,
        "graphs": 10.0,
        "rest": 2.0,
    }
    assert sum(phases.values()) == LOG[-1][0]


def test_a_line_that_comes_before_its_phase_does_not_end_it():
    early = [(1.0, "INFO Graph capturing finished in 0 secs, took 0.0 GiB"), *LOG]
    assert start_phases(early) == start_phases(LOG)


def test_a_phase_without_a_line_is_part_of_the_next_one():
    eager = [line for line in LOG if "torch.compile" not in line[1] and "Graph" not in line[1]]
    phases = start_phases(eager)
    assert "compile" not in phases
    assert phases["first pass"] == 14.0
    assert sum(phases.values()) == 60.0
    assert start_phases([]) == {}


@pytest.mark.slow
def test_an_arm_that_ends_or_does_not_answer_says_so():
    ends = Arm("benchmarks.gpu.engine_arm", {"kind": "no such"})
    with pytest.raises(ArmError, match="ended with status 1: KeyError: 'shape'"):
        ends.answer(60.0)
    ends.close()
    assert ends.has_ended
    hangs = Arm("tests.benchmarks.failing_parts", {})
    with pytest.raises(ArmError, match="not done after 0 s"):
        hangs.answer(0.01)
    hangs.close()
    assert hangs.has_ended
