"""The section `turns`."""

import pytest

from tasks.configuration.turns import TurnsConfig

AGENT = "agents:one"


def test_an_agent_is_alone():
    assert TurnsConfig(agent=AGENT, turns_max=3).agent == AGENT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", ("tools:look",)),
        ("environment", "mazes:Maze"),
        ("side_effects", ("look",)),
        ("replay", True),
        ("on_unknown", "fail"),
    ],
)
def test_what_says_nothing_of_an_agent_is_refused(name, value):
    with pytest.raises(
        ValueError, match=f"^{name}: given together with agent, which calls its tools itself; allowed: "
    ):
        TurnsConfig(agent=AGENT, **{name: value})


def test_one_of_them_is_needed():
    with pytest.raises(ValueError, match=r"^tools, environment, agent: none is given; allowed: tools, an environment"):
        TurnsConfig()


@pytest.mark.parametrize("value", ["agents", "agents:", "http://localhost/v1"])
def test_an_agent_is_named_as_a_function(value):
    with pytest.raises(ValueError, match=r"^tools, environment, agent: value .*; allowed: 'package\.module:name'"):
        TurnsConfig(agent=value)
