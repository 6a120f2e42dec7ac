"""The digest of the package's code: the same for the same files, and another one after any change of them."""

import re

import pytest

from resources.package_code import PACKAGES, OtherCode, code_digest, code_files, refuse_other_code


def test_it_changes_with_each_file_of_each_package_and_with_a_file_more(tmp_path):
    found = [code_digest(tmp_path)]
    for package in PACKAGES:
        (tmp_path / package / "inner").mkdir(parents=True)
        for name, content in (("part.py", "A = 1"), ("part.py", "A = 2"), ("page.js", "a"), ("again.py", "A = 2")):
            (tmp_path / package / "inner" / name).write_text(content)
            found.append(code_digest(tmp_path))
    assert len(set(found)) == len(found) == 21
    assert code_digest(tmp_path) == found[-1]


def test_compiled_files_and_other_folders_do_not_count(tmp_path):
    (tmp_path / "tasks/__pycache__").mkdir(parents=True)
    before = code_digest(tmp_path)
    for name in ("tasks/__pycache__/part.cpython-311.pyc", "my_reward.py"):
        (tmp_path / name).write_bytes(b"x")
    assert code_digest(tmp_path) == before


def test_this_package_has_its_pages_and_modules():
    names = {path.name for path in code_files()}
    assert {"package_code.py", "page.html", "page.js", "page.css", "training.py", "train_iteration.py"} <= names


def test_other_code_is_refused_with_both_digests_and_no_digest_is_not_compared(tmp_path):
    own = code_digest()
    refuse_other_code(own)
    refuse_other_code("")
    with pytest.raises(OtherCode, match=re.escape(f"code {own} in this pod; allowed: 0123456789ab, with which")):
        refuse_other_code("0123456789ab")
