"""Stored texts on a real terminal, in a log and in HTML: every control character is seen, and none acts."""

import pytest

from resources.visible_text import markup, visible_line
from tests.terminals import on_terminal

# By whatever way a command writes: as it does, by Python's own, to a log, and in a table.
PROGRAM = """
import logging
import sys
import click
from rich.table import Table
from resources.visible_text import visible_output
from tasks.reporting.terminal import Terminal

text = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
with visible_output():
    click.echo(f"echoed {text}")
    click.echo(f"told {text}", err=True)
    print(f"printed {text}")
    logging.warning("logged %s\\nforged", text)
    table = Table("cell", title=f"title {text}")
    table.add_row(f"[link=http://evil.example]cell {text}[/link]")
    Terminal(width=120).print(table)
"""


@pytest.mark.slow
def test_no_way_to_write_lets_a_control_character_through():
    shown = on_terminal("-c", PROGRAM, whole=True)
    assert shown.code == 0, shown.terminal
    for way in ("echoed", "told", "printed", "logged", "title", "cell"):
        assert rf"{way} a\x1b]0;owned\x07\x1b[2J\x9b31m\u202e" in shown.terminal, way
    assert not {"\x07", "\x9b", "\u202e"} & set(shown.terminal)
    assert "\x1b]" not in shown.terminal
    assert "\x1b[2J" not in shown.terminal
    assert "[link=http://evil.example]" in shown.terminal
    assert r"\x0aforged" in shown.terminal


def test_a_text_in_html_and_on_a_line_is_only_text():
    assert markup("<b>\x1b[2J\u202e") == r"&lt;b&gt;\x1b[2J\u202e"
    assert visible_line("a\n\tb") == r"a\x0a\x09b"
