"""The section `turns`: the tools, the environment or the agent that the policy works with, and the limits on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tasks.configuration import user_function
from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.rewards import RewardConfig

STRICT = ConfigDict(extra="forbid", strict=True)
# Settings for where tools run and how many at once; what is learned does not depend on them.
OPERATIONAL = ("processes", "environment_variables")


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """Tools, and an environment whose public methods are tools, with the signatures that TRL asks for; or an agent.

    Attributes:
        tools: functions "package.module:function", with types and a Google docstring.
        environment: a class "package.module:Class" with reset(**columns); its other public methods are tools.
        agent: a function "package.module:function" with (base_url, api_key, **columns); it is a program that sends
            requests to that address, as to OpenAI's, and returns a reward or None.
        side_effects: names of tools whose calls change something outside; the policy's turn is in the journal before
            they are called.
        on_unknown: what follows if an earlier incarnation may have made a call: "call" makes it with the same call_id;
            "fail" gives the environment up.
        replay: whether an environment that can neither set its state nor restore is rebuilt by making its recorded
            calls again.
        turns_max: the most turns of the policy in a response; the last one's calls are not made.
        observation_tokens_max: the most tokens of one observation; longer results are cut, and marked as cut.
        call_time_limit_s: a call that takes longer is answered with an error; an agent that needs longer to the next
            request, or to the end, is lost.
        processes: the number of child processes of a member.
        environment_variables: the credentials of stores and hubs that tools and rewards see in their environment
            variables; of others they see all.
    """

    __pydantic_config__ = STRICT
    tools: tuple[str, ...] = ()
    environment: str | None = None
    agent: str | None = None
    side_effects: tuple[str, ...] = ()
    on_unknown: Literal["call", "fail"] = "call"
    replay: bool = False
    turns_max: Annotated[int, Field(ge=1, le=10_000)] = 16
    observation_tokens_max: Annotated[int, Field(ge=1)] = 2048
    call_time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    processes: Annotated[int, Field(ge=1, le=1024)] = 2
    environment_variables: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()

    def __post_init__(self) -> None:
        if not self.tools and self.environment is None and self.agent is None:
            raise ValueError(
                "tools, environment, agent: none is given; allowed: tools, an environment, or both, or an agent"
            )
        if self.agent is not None:
            self._check_alone()
        for value in self.functions:
            if not user_function.PATTERN.fullmatch(value):
                raise ValueError(f"tools, environment, agent: value {value!r}; allowed: 'package.module:name'")
        names = [value.rpartition(":")[2].rpartition(".")[2] for value in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: {name!r} is the name of {names.count(name)} of them; allowed: each its own")
        for name in self.side_effects:
            if self.environment is None and name not in names:
                raise ValueError(f"side_effects: value {name!r}; allowed: names of tools: {', '.join(names)}")

    @property
    def functions(self) -> tuple[str, ...]:
        """All that the section names, as "package.module:name": what runs beside the policy."""
        return (*self.tools, *filter(None, (self.environment, self.agent)))

    def _check_alone(self) -> None:
        """Raise ValueError for settings that say nothing of an agent, which calls its tools itself."""
        idle = {
            "tools": bool(self.tools),
            "environment": self.environment is not None,
            "side_effects": bool(self.side_effects),
            "replay": self.replay,
            "on_unknown": self.on_unknown != "call",
        }
        for name in (name for name, is_set in idle.items() if is_set):
            raise ValueError(
                f"{name}: given together with agent, which calls its tools itself; allowed: one of the two"
            )


def rewards_without_environment(
    turns: TurnsConfig | None, rewards: Sequence[RewardConfig], evaluation: EvaluationConfig | None
) -> Iterator[str]:
    """A line about each reward "environment" in a run that has none."""
    if turns is not None and (turns.environment or turns.agent):
        return
    own = evaluation.rewards if evaluation is not None else None
    for section, configs in (("rewards", rewards), ("evaluation.rewards", own or ())):
        for index, config in enumerate(configs):
            if config.function == "environment":
                where = f"{section}.{index}.function"
                yield f"{where}: value 'environment'; allowed only with turns.environment or turns.agent"
