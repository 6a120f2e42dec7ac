"""The environments of a member: processes of tools or agents, and the policy's language, from the run's model files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.journal.noise_keys import group_seed
from storage.records import layout
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.prompts.openings import reset_columns
from tasks.turns.agent_environments import AgentEnvironments
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.conversation import Conversation
from tasks.turns.environments import Environments, OpenTurn
from tasks.turns.living_environments import Reset
from tasks.turns.process_environments import ProcessEnvironments


@contextmanager
def opened_environments(
    turns: TurnsConfig | None, store: ObjectStore, plan: PlanRecord, model_dir: Path
) -> Iterator[Environments | None]:
    """The environments for every plan of the run, closed at the end of the block; None without turns.

    Raises the errors of transformers for a tokenizer that it does not understand.
    """
    if turns is None:
        yield None
        return
    stops = plan.sampling.stop_token_ids
    tokenizer = read_tokenizer(model_dir)
    environments: AgentEnvironments | ProcessEnvironments
    if turns.agent is not None:
        language = AgentLanguage(tokenizer, stops, skip_special_tokens=plan.sampling.skip_special_tokens)
        environments = AgentEnvironments(turns, language, stops, _reset)
    else:
        environments = ProcessEnvironments(
            turns,
            lambda tools: Conversation(tokenizer, tools, stops),
            stops,
            resets=_reset,
            read_object=lambda iteration, digest: store.get(layout.environment_state(iteration, digest)),
        )
    try:
        yield environments
    finally:
        environments.close()


def _reset(turn: OpenTurn) -> Reset:
    """What the plan has reset the environment of the turn's group with."""
    row = turn.prompt
    columns = reset_columns(row.prompt, row.columns, row.opening)
    return Reset(columns, group_seed(turn.run_seed, turn.iteration, turn.group), row.opening)
