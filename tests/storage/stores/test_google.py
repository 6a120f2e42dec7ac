"""CloudStore against a server that speaks Google's XML API; one that ignores generations is refused by name."""

import os
import uuid
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

pytest.importorskip("obstore", reason="obstore is not installed: pip install -c constraints.txt -e '.[dev]'")

from gleaner import main
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from storage.testing import StoreContract
from tests.google_server import BUCKET, GoogleObjects, google_server

pytestmark = pytest.mark.slow


def point_to(endpoint: str, environment: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        environment.delenv(name)
    environment.setenv("STORAGE_EMULATOR_HOST", endpoint)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with google_server(GoogleObjects()) as endpoint:
        yield endpoint


class TestGoogle(StoreContract):
    races = 12
    many_keys = 130
    overwrites = 40

    @pytest.fixture
    def store(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        point_to(endpoint, monkeypatch)
        return connect(f"gs://{BUCKET}/{uuid.uuid4().hex}")


@pytest.mark.parametrize("honours", [True, False])
def test_check_refuses_a_server_that_ignores_generations_by_name(monkeypatch, honours):
    with google_server(GoogleObjects(honours=honours)) as endpoint:
        point_to(endpoint, monkeypatch)
        url = f"gs://{BUCKET}/proof"
        result = CliRunner().invoke(main, ["check", "--store", url, "--keys", "4"], catch_exceptions=False)
    lines = result.stdout.splitlines()
    if honours:
        assert (result.exit_code, lines[-1]) == (0, f"{url} is fit")
        assert "80 creates, 4 winners" in lines[2] or "64 creates, 4 winners" in lines[2]
    else:
        assert result.exit_code == 1
        assert "the condition of an atomic create is ignored" in lines[0]
        assert lines[-1].startswith(f"{url} is not fit; lacking: a second create is refused, one winner")
