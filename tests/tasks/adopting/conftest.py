"""Scripts of TRL, as files of a folder of their own."""

from pathlib import Path

import pytest

from tasks.adopting.init_command import adopt


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(template, arguments, more) -> the adoption of the script, which lies in the current directory."""
    monkeypatch.chdir(tmp_path)

    def adopted(template, arguments="", more="", words=()):
        Path("train.py").write_text(template.format(arguments=arguments, more=more))
        return adopt("trl", Path("train.py"), words)

    return adopted
