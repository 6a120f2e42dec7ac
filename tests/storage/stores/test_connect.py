import subprocess
import sys

import pytest

from storage.stores.connect import check_url, connect
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore


def test_a_path_is_a_directory(tmp_path):
    store = connect(str(tmp_path / "run"))
    assert isinstance(store, LocalStore)
    assert store.url == str(tmp_path / "run")


def test_a_file_url_is_a_directory(tmp_path):
    store = connect(f"file://{tmp_path}/a%20run")
    assert isinstance(store, LocalStore)
    assert store.url == str(tmp_path / "a run")


def test_a_relative_path_and_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert connect("runs/first").url == str(tmp_path / "runs" / "first")
    assert connect("./a:b").url == str(tmp_path / "a:b")
    assert connect("~/run").url == str(tmp_path / "home" / "run")


def test_a_name_in_memory_is_one_store_of_this_process():
    store = connect("memory://one")
    store.put("a", b"1")
    assert isinstance(store, MemoryStore)
    assert connect("memory://one").get("a") == b"1"
    assert connect("memory://two").list("") == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/runs/user=me/7/", "s3://bucket/runs/user=me/7"),
    ],
)
def test_s3_urls_connect_to_nothing_yet(url, shown):
    assert connect(url).url == shown


@pytest.mark.parametrize("kind", ["path", "memory", "s3"])
def test_the_url_of_a_store_leads_back_to_it(tmp_path, kind):
    url = {"path": str(tmp_path), "memory": "memory://back", "s3": "s3://bucket/runs/7"}[kind]
    assert connect(connect(url).url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gcs://bucket/x",
        "http://host/x",
        "memory://",
        "memory://a//b",
        "memory://a/../b",
        "memory://a/",
        "file://host/x",
        "file://",
        "file:/x",
        "s3:bucket/x",
        "a:b",
        "x\ny",
        " x",
        "x\x00",
        "x\udcff",
    ],
)
def test_other_urls_are_refused_with_what_is_allowed(url):
    with pytest.raises(ValueError, match=r"az://container/prefix or memory://name") as caught:
        connect(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("url", ["s3:/bucket/x", "s3://", "s3:///x", "s3://b/../x", "s3://b/a//c", "s3://b/x?y=1"])
def test_malformed_s3_urls_are_refused(url):
    with pytest.raises(ValueError, match=r"s3://bucket/prefix|joined by"):
        connect(url)


@pytest.mark.parametrize(
    "url", ["x" * 256, "x/" * 2000, "file:///a%00b", "~nosuchuser/x", "s3://b/" + "x" * 769, "s3://.."]
)
def test_places_that_no_file_system_and_no_bucket_has_are_refused(url):
    with pytest.raises(ValueError, match="allowed: "):
        connect(url)
    with pytest.raises(ValueError, match="allowed: "):
        check_url(url)


def test_checking_a_url_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("runs/a", "s3://bucket/x", "memory://checked", f"file://{tmp_path}/b"):
        check_url(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["s3://key:hush@bucket/x", "http://me:hush@host/x", "s3://key:hush/x", "me:hush@host", " s3://k:hush@b"]
)
def test_a_password_in_the_url_is_not_repeated(url):
    with pytest.raises(ValueError, match="storage URL") as caught:
        connect(url)
    assert "hush" not in str(caught.value)


def test_only_s3_pays_for_s3():
    code = (
        "import sys; from storage.stores.connect import connect; connect('x'); connect('memory://x');"
        "print(any(name in sys.modules for name in ('s3fs', 'fsspec', 'botocore', 'numpy', 'pyarrow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"
