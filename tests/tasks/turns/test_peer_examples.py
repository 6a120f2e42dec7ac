"""The example tools that verl's wheel carries, unchanged: its own file is imported by its path, not copied."""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments
from tasks.turns.testing import LIMIT_S, gathered
from tests.character_turns import STOP, CharacterConversation, said, text_of

pytestmark = [pytest.mark.peers, pytest.mark.slow]
VERL, EXAMPLES = "0.9.1", "tests/experimental/agent_loop/function_tool_examples.py"


@pytest.fixture
def verl_examples(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of verl's module of examples, which this process and its children can import."""
    try:
        verl = distribution("verl")
    except PackageNotFoundError:
        pytest.skip(f"needs verl {VERL}; tests/data/golden/make_golden.py says how to install it")
    if verl.version != VERL:
        pytest.skip(f"needs verl {VERL} (found: {verl.version})")
    path = Path(str(verl.locate_file(EXAMPLES)))
    assert path.is_file(), f"verl {VERL} has no {EXAMPLES}"
    monkeypatch.setattr(sys, "path", [*sys.path, str(path.parent)])
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    return path.stem


def test_function_tools_of_verl_are_called_unchanged(verl_examples: Any):
    config = TurnsConfig(
        tools=tuple(f"{verl_examples}:{name}" for name in ("get_weather", "calculator", "fetch_url")),
        call_time_limit_s=LIMIT_S,
        processes=1,
    )
    reset = Reset({}, 1, None)
    environments = ProcessEnvironments(config, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes)
    try:
        texts = [
            '!get_weather {"city": "Tokyo"}',
            '!calculator {"expression": "(3+4)*5"}',
            '!calculator {"expression": "3 apples"}',
            '!fetch_url {"url": "http://example.com"}',
        ]
        environments.begin([said(text, response) for response, text in enumerate(texts)])
        answers = [text_of(answer) for _, answer in sorted(gathered(environments, len(texts)).items())]
    finally:
        environments.close()
    assert answers[0] == '<{"temperature_c": 17.3, "condition": "drizzle"}>\n'
    assert answers[1] == "<35>\n"
    assert answers[2].startswith("<ERROR: ")
    assert answers[3] == "<<stub body for http://example.com>>\n"
