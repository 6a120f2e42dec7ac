"""A member's process whose store refuses it in the middle of its work, and then no longer: it loses no token."""

import json
import subprocess
import sys
import uuid

import pytest

from storage.clock import SystemClock
from storage.records import layout
from storage.stores.connect import connect
from tasks.sampling.session.member import generate_slot
from tests.processes import ROOT, wait_until
from tests.s3_server import S3_BUCKET, Gate, make_bucket, moto_server, point_to, write_keys
from tests.small_run import memory_store, roll_out
from tests.tasks.sampling.session.test_crew_on_stores import WORKER, model, plan, tokens

__all__ = ["model"]

OLD, NEW = "AKIAOLD", "AKIANEW"


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ExpiredToken", "RequestTimeTooSkewed"])
def test_a_member_goes_on_with_new_keys_and_when_its_clock_is_right_again(model, tmp_path, monkeypatch, code):
    memory_store("accepted")
    plan("memory://accepted", model)
    roll_out("memory://accepted", 0)
    with moto_server(Gate) as (endpoint, gate):
        assert isinstance(gate, Gate)
        point_to(endpoint, monkeypatch)
        make_bucket(endpoint)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        write_keys(tmp_path / "credentials", OLD)
        url = f"s3://{S3_BUCKET}/{uuid.uuid4().hex}"
        plan(url, model)
        gate.code, gate.trap = code, ("/journal/", frozenset({OLD}))
        member = subprocess.Popen(
            [sys.executable, "-c", WORKER, url, "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        wait_until(lambda: gate.denied > 8 or member.poll() is not None)
        if code == "ExpiredToken":
            write_keys(tmp_path / "credentials", NEW)
        else:
            gate.refused = frozenset()
        said, errors = member.communicate(timeout=600)
        assert member.returncode == 0, errors
        assert gate.denied > 8
        assert json.loads(said)["tokens_generated"] > 0
        write_keys(tmp_path / "credentials", NEW)
        assert len(connect(url).list(layout.alive_all(0))) == 1, "it had one life"
        generate_slot(url, 0, 1, lambda: False, SystemClock())
        assert tokens(url) == tokens("memory://accepted")
