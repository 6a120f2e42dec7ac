"""The undisturbed responses of a simulated plan, which the scripted engine generates alone in one process.

Every response that a simulated crew journals is compared with its undisturbed twin.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from simulation.simulated_history import CONTEXT, VOCABULARY, History
from storage.clock import ManualClock
from storage.journal.assembly import Assembled
from storage.journal.noise_keys import noise_key
from storage.journal.shard import Finish, Logprobs, TokenIds
from storage.records.prompt_table import PromptRow
from tasks.sampling.engines.engine import FinishReason, GenerationRequest
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.turns.environments import Answer, OpenTurn
from tasks.turns.scripted_environments import Script, ScriptedEnvironments, ToolServer

FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A complete response: token ids and the policy's log-probs.

    Attributes:
        token_ids: uint32 [n].
        logprobs: float32 [m], of the tokens that the policy sampled.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish: Finish


def prompt(group: int) -> PromptRow:
    return PromptRow(str(group), (1, 2, group + 3), "p", {})


def undisturbed(history: History) -> dict[int, Whole]:
    """Every response of the plan, by number."""
    plan = history.plan
    engine = ScriptedEngine(VOCABULARY, 1, context_length=CONTEXT, median_length=history.median_length)
    engine.load_weights(plan.weight_version, {})
    return {response: _decode(engine, history, response) for response in range(plan.num_responses)}


def _decode(engine: ScriptedEngine, history: History, response: int) -> Whole:
    plan = history.plan
    group = response // plan.num_generations
    key = noise_key(plan.run_seed, plan.iteration, response)
    engine.start([GenerationRequest(response, group, prompt(group).token_ids, (), key, plan.sampling)])
    token_ids: list[int] = []
    logprobs: list[float] = []
    events: list[bytes] = []
    turn_start = 0
    while True:
        (delta,) = engine.step()
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        if delta.finish_reason is None:
            continue
        finish = FINISH[delta.finish_reason]
        if history.script is not None:
            answer = _answer(history, history.script, response, token_ids, events, turn_start)
            finish = answer.finish
            token_ids += answer.token_ids
            events.append(answer.event)
        if finish.ends_response:
            return Whole(np.array(token_ids, np.uint32), np.array(logprobs, np.float32), finish)
        turn_start = len(token_ids)
        engine.start(
            [GenerationRequest(response, group, prompt(group).token_ids, tuple(token_ids), key, plan.sampling)]
        )


def _answer(
    history: History, script: Script, response: int, token_ids: list[int], events: list[bytes], turn_start: int
) -> Answer:
    """The answer to a turn, by an environment that is never lost."""
    plan, clock = history.plan, ManualClock()
    group = response // plan.num_generations
    environments = ScriptedEnvironments(replace(script, losses=0, can_be_rebuilt=True), ToolServer(), clock, VOCABULARY)
    turn = OpenTurn(
        run_seed=plan.run_seed,
        iteration=plan.iteration,
        group=group,
        response=response,
        epoch=0,
        prompt=prompt(group),
        token_ids=tuple(token_ids),
        logprobs=(),
        events=tuple(events),
        turn_start=turn_start,
        room=plan.sampling.max_completion_length - len(token_ids),
        unknown=False,
        restarts=0,
    )
    environments.begin([turn])
    (answer,) = environments.answers(math.inf)
    return answer


def begins(assembled: Assembled, whole: Whole) -> bool:
    """Whether tokens and log-probs are the first of the whole response; if the response has ended, all of them."""
    length = len(assembled.token_ids)
    if assembled.finish.ends_response and (length != len(whole.token_ids) or assembled.finish is not whole.finish):
        return False
    return np.array_equal(assembled.token_ids, whole.token_ids[:length]) and np.array_equal(
        assembled.logprobs, whole.logprobs[: assembled.policy_length]
    )
