"""What flytekit leaves open at the end of a process is closed, so that a good end is without a complaint."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3_server import S3_BUCKET

ROOT = Path(__file__).parents[3]
# As a container does it: through flytekit's own file access.
READS = """
import sys
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.utils.asyn import run_sync

files = FileAccessProvider("{folder}", "s3://{bucket}/raw", DataConfig.auto())
open("{folder}/x", "w").write("x")
run_sync(files._put, "{folder}/x", "s3://{bucket}/sessions/x")
if {closes}:
    from storage.stores.open_sessions import close_at_exit
    close_at_exit()
    close_at_exit()
if {forks}:
    import os
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    run_sync(files._put, "{folder}/x", "s3://{bucket}/sessions/y")
"""


def said(s3_url, folder, *, closes, forks=False):
    code = READS.format(folder=folder, bucket=S3_BUCKET, closes=closes, forks=forks)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stderr


@pytest.mark.slow
def test_a_process_that_has_used_flytekits_files_ends_in_silence(s3_url, tmp_path):
    assert "Unclosed client session" in said(s3_url, tmp_path, closes=False)
    assert said(s3_url, tmp_path, closes=True) == ""


@pytest.mark.slow
def test_a_forked_child_leaves_its_parents_sessions_alone(s3_url, tmp_path):
    assert "Unclosed" not in said(s3_url, tmp_path, closes=True, forks=True)
