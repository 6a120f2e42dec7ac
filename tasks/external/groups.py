"""Groups as an external trainer gets them: a prompt and its responses with tokens, log-probs, versions and rewards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.journal.assembly import Assembled
from storage.records.lineage import ReplayedGroup
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse, PlanRecord
from storage.records.run import num_drawn
from tasks.learning.recorded_batches import BatchReader


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A finished response of a group.

    Attributes:
        sample: The index in the group, from 0.
        token_ids: int64 [n], with the observations of a run with turns.
        policy_mask: bool [n], True for the m tokens that the policy sampled, False for observations.
        logprobs: float32 [m], of the sampled tokens at sampling.
        weight_versions: int64 [m], the version that sampled each token.
        completion: The text that rewards read.
        finish_reason: "stop", "length" (cut at the limit), or "failed" (its environment was lost: do not train it).
        reward: The weighted sum of the run's rewards; 0 for a run without rewards, None for "failed".
        rewards: Each reward by name; None where a function does not apply.
    """

    sample: int
    token_ids: npt.NDArray[np.int64]
    policy_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int64]
    completion: str
    finish_reason: str
    reward: float | None
    rewards: dict[str, float | None]

    @property
    def token_logprobs(self) -> npt.NDArray[np.float32]:
        """float32 [n], the log-prob of each token at sampling; 0 for observations."""
        found = np.zeros(len(self.token_ids), np.float32)
        found[self.policy_mask] = self.logprobs
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The responses to one prompt.

    Attributes:
        step: The iteration.
        number: The group's place among the iteration's prompts, from 0.
        prompt: The text or the chat messages.
        prompt_token_ids: The prompt as the policy reads it.
        columns: The other columns of the prompt's row.
        responses: By `sample`.
        replayed: Run, iteration, group and weight version that the responses come from (`data.replay`); None for
            responses to this step, to which alone `weight_versions` refer.
    """

    step: int
    number: int
    prompt: str | list[dict[str, Any]]
    prompt_token_ids: tuple[int, ...]
    columns: dict[str, Any]
    responses: tuple[Response, ...]
    replayed: ReplayedGroup | None = None

    @property
    def mean_reward(self) -> float:
        """The mean reward, without failed responses; 0 if every response failed.

        A trainer that needs a reward of a failed response gets the mean, which moves no other response's advantage.
        """
        rewards = [response.reward for response in self.responses if response.reward is not None]
        return sum(rewards) / max(1, len(rewards))


def groups_of(
    batch: BatchRecord,
    plan: PlanRecord,
    prompts: Sequence[PromptRow],
    reader: BatchReader,
    decode: Callable[[Sequence[int]], str],
) -> Iterator[Group]:
    """The groups of a recorded micro-batch, without those that dynamic sampling filters; raises CorruptObject.

    prompts: One row per group of the plan. decode: Makes the text of a response from token ids.
    """
    ordered = sorted(batch.responses, key=lambda graded: graded.response)
    for number, graded in groupby(ordered, key=lambda graded: graded.response // plan.num_generations):
        row, drawn = prompts[number], num_drawn(plan)
        yield Group(
            step=plan.iteration,
            number=number,
            prompt=row.prompt,
            prompt_token_ids=row.token_ids,
            columns=row.columns,
            responses=tuple(_response(each, reader.tokens(each), plan, decode) for each in graded),
            replayed=plan.replayed[number - drawn] if number >= drawn else None,
        )


def _response(
    graded: GradedResponse, read: Assembled, plan: PlanRecord, decode: Callable[[Sequence[int]], str]
) -> Response:
    # Stretches of the policy and of observations take turns; the policy begins.
    by_policy = [place % 2 == 0 for place in range(len(read.origins))]
    mask = np.repeat(np.array(by_policy, dtype=bool), np.array(read.origins, dtype=np.int64))
    token_ids = read.token_ids.astype(np.int64)
    return Response(
        sample=graded.response % plan.num_generations,
        token_ids=token_ids,
        policy_mask=mask,
        logprobs=read.logprobs,
        weight_versions=read.weight_versions.astype(np.int64)[mask],
        completion=decode(token_ids.tolist()),
        finish_reason=graded.finish_reason,
        reward=graded.reward,
        rewards=dict(graded.rewards),
    )
