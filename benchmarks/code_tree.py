"""The code of a commit, or of the working tree, in a folder of its own, and runs that this code trains.

Both sides of a comparison are copies, so neither has more files to look through, or compiled modules that the other
lacks. Processor time is that of everything that descends from this process (Linux).
"""

import compileall
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from resources.process import descendants

ROOT = Path(__file__).resolve().parents[1]
END_LIMIT_S = 300.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def copy_commit(commit: str, folder: Path) -> Path:
    """The files of a commit below `folder`; raises LookupError for an unknown one."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise LookupError(f"--against: value {commit!r}; allowed: a commit ({done.stderr.decode().strip()})")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return _compiled(folder)


def copy_working_tree(folder: Path) -> Path:
    """The files of the working tree below `folder`, with uncommitted changes."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return _compiled(folder)


def _compiled(folder: Path) -> Path:
    compileall.compile_dir(folder, quiet=2)
    return folder


def processor_s() -> float:
    """Seconds of processor time that all descendants of this process have taken, ended or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for process in descendants(os.getpid()):
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            # Of the process and of its own ended children, in user and system mode.
            ticks += sum(map(int, fields[11:15]))
    return ended.ru_utime + ended.ru_stime + ticks / _TICKS_PER_S


def reap_orphans() -> None:
    """Take the exit statuses of adopted processes, whose time counts only then; no child of ours may still run."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill(process: "subprocess.Popen[Any]") -> None:
    """End a child that still runs, with everything that it has started."""
    if process.poll() is None:
        kill_descendants(process.pid)
        process.kill()
        process.wait()


def kill_descendants(process: int) -> None:
    """Kill everything that descends from a process."""
    for each in descendants(process):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


class Session:
    """A process that trains runs by a tree's own workflow, one after the other."""

    def __init__(self, tree: Path, log: Path) -> None:
        self._tree, self._log = tree, log
        self._environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(ROOT / "benchmarks" / "tree_session.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=tree,
                env=self._environment,
                text=True,
            )

    def __enter__(self) -> Self:
        try:
            self._check_workflow()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert self._child.stdin is not None
                self._child.stdin.close()
                self._child.wait(END_LIMIT_S)
        finally:
            self._end()

    def _check_workflow(self) -> None:
        workflow = Path(self._answer())
        if not workflow.is_relative_to(self._tree):
            raise RuntimeError(f"the session of {self._tree} has imported {workflow}")

    def _end(self) -> None:
        """Leave nothing of the session behind."""
        _kill(self._child)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.stdout.close()

    def train(self, document: Mapping[str, Any], count: int) -> None:
        """Train `count` iterations of the run with this configuration; a run with a fleet is the fleet's only run."""
        with self._host(document):
            assert self._child.stdin is not None
            print(json.dumps({"config": document, "count": count}), file=self._child.stdin, flush=True)
            self._answer()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the session of {self._tree} has ended:\n{self._said()}")
        return line

    def _said(self) -> str:
        return self._log.read_text()[-4000:]

    @contextmanager
    def _host(self, document: Mapping[str, Any]) -> Iterator[None]:
        """Within it a host of the tree serves the fleet of the configuration, if that names one."""
        fleet, url = document["trainer"].get("fleet"), Path(document["run"]["url"])
        if fleet is None:
            yield
            return
        config = url.with_name(f"{url.name}.yaml")
        config.write_text(yaml.safe_dump(dict(document)))
        for command in (
            ("init", fleet, "--runs", str(url.parent)),
            ("admit", str(config), "--phase-s", "1", "--cycle-s", "10"),
        ):
            if self._gleaner("fleet", *command).wait():
                raise RuntimeError(f"gleaner fleet {command[0]} has failed:\n{self._said()}")
        # One device, whatever GPUs this machine has.
        how = ("--memory-gib", "4", "--devices", "1", "--poll-interval-s", "0.1")
        host = self._gleaner("fleet", "host", fleet, *how)
        try:
            yield
        finally:
            try:
                host.send_signal(signal.SIGTERM)
                host.wait(END_LIMIT_S)
            finally:
                _kill(host)

    def _gleaner(self, *arguments: str) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(self._tree / "gleaner.py"), *arguments],
                stdout=log,
                stderr=log,
                cwd=self._tree,
                env=self._environment,
            )
