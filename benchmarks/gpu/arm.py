"""Arm: a process that measures one contestant, answers lines with lines, and costs only itself when it hangs or breaks.

Each line of its log has the second at which it came, so that a start can be broken down (`start_phases`).
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).parents[2]
_CLOSED_WITHIN_S = 10.0
# What vLLM's log says at the end of each phase of its start; the first line that fits counts. An arm itself writes
# the first and the last.
IMPORTED, STARTED = "gleaner: vLLM is imported", "gleaner: the engine has started"
PHASES = (
    ("import", re.compile(re.escape(IMPORTED))),
    ("settings and processes", re.compile(r"Initializing a V1 LLM engine")),
    ("worker", re.compile(r"Starting to load model|Loading model from scratch")),
    ("load", re.compile(r"Model loading took|Loading weights took")),
    ("compile", re.compile(r"torch\.compile (?:and initial profiling/warmup run together )?took")),
    ("first pass", re.compile(r"profiling/warmup run took|skipped memory profiling")),
    ("key-value cache", re.compile(r"KV cache size: ")),
    ("graphs", re.compile(r"Graph capturing finished|init engine \(profile")),
    ("rest", re.compile(re.escape(STARTED))),
)


class ArmError(RuntimeError):
    """An arm has ended, or has not answered in time."""


class Arm:
    """A running arm. log: the lines of its standard error, each with the seconds since the arm was started."""

    def __init__(
        self, module: str, argument: Mapping[str, Any], python: str = sys.executable, **environment: str
    ) -> None:
        self.log: list[tuple[float, str]] = []
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._began_s = time.monotonic()
        # In the part's process group, which is ended as a whole.
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(argument)],
            cwd=_ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=_each_line, args=(pipe, take), daemon=True)
            for pipe, take in ((self._process.stdout, self._take_answer), (self._process.stderr, self._take_log))
        ]
        for reader in self._readers:
            reader.start()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line that the arm writes, which is a JSON object; raises ArmError."""
        try:
            line = self._answers.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise ArmError(f"not done after {limit_s:.0f} s") from None
        if line is None:
            self._readers[1].join(_CLOSED_WITHIN_S)
            said = next((text for _, text in reversed(self.log) if text.strip()), "it printed nothing")
            raise ArmError(f"ended with status {self._process.wait()}: {said.strip()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a line, and return the answer; raises ArmError."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
        return self.answer(limit_s)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End the arm's input, with which it ends."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the arm, by force if it does not end with its input."""
        self.end()
        try:
            self._process.wait(_CLOSED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:  # what an engine has started may hold the pipes a little longer
            reader.join(_CLOSED_WITHIN_S)

    def _take_answer(self, line: str | None) -> None:
        self._answers.put(line)

    def _take_log(self, line: str | None) -> None:
        if line is not None:
            self.log.append((time.monotonic() - self._began_s, line))
            sys.stderr.write(line)


def _each_line(pipe: IO[str], take: Any) -> None:
    """Hand over each line, and None at the end."""
    with pipe:
        for line in pipe:
            take(line)
    take(None)


def start_phases(log: Sequence[tuple[float, str]]) -> dict[str, float]:
    """The seconds of each phase of a start that the log shows, in their order.

    A phase without a line, such as graphs with `enforce_eager`, is part of the next one.
    """
    found, ended_s, place = {}, 0.0, 0
    for name, mark in PHASES:
        for index in range(place, len(log)):
            second, line = log[index]
            if mark.search(line):
                found[name], ended_s, place = second - ended_s, second, index + 1
                break
    return found
