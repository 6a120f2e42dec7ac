"""Forward passes: responses are read from the journal and dealt to ranks; this rank gets its padded batches.

Every rank makes equally many passes, so a rank with fewer responses gets idle batches.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from storage.journal.assembly import Assembled
from storage.records.prompt_table import PromptRow
from storage.records.records import GradedResponse, PlanRecord
from tasks.learning.batching import TokenBatch, collate, dealt_passes, idle_batch
from tasks.learning.padding import SharedPrompt, together
from tasks.learning.ranks import Ranks
from tasks.learning.recorded_batches import BatchReader


class ForwardPasses:
    """Callable: responses -> iterator of this rank's forward passes.

    Args:
        batches: Reads the tokens of recorded responses.
        plan: The iteration's plan.
        prompts: The iteration's prompts, by group.
        tokens_max: The most tokens of a pass, padding included.
        ranks: The ranks among which responses are dealt.
        packed: Passes without padding, with shared prompts once.
        pairs: The two responses of a group share a pass, because their losses depend on each other.
    """

    def __init__(
        self,
        batches: BatchReader,
        plan: PlanRecord,
        prompts: Sequence[PromptRow],
        tokens_max: int,
        ranks: Ranks,
        *,
        packed: bool = False,
        pairs: bool = False,
    ) -> None:
        self._batches = batches
        self._plan = plan
        self._prompts = prompts
        self._tokens_max = tokens_max
        self._ranks = ranks
        self._packed = packed
        self._size = 2 if pairs else 1
        self._versions: dict[int, npt.NDArray[np.uint32]] = {}

    def __call__(self, responses: Sequence[GradedResponse]) -> Iterator[TokenBatch]:
        """Yield this rank's passes; the recorded lineage of a response determines its tokens.

        responses: with `pairs`, both of each group, adjacent.

        Raises:
            CorruptObject: The journal no longer holds the tokens of a response.
        """
        prompts = [self._prompts[graded.response // self._plan.num_generations].token_ids for graded in responses]
        lengths = [len(prompt) + graded.length for prompt, graded in zip(prompts, responses, strict=True)]
        shared = [
            SharedPrompt(graded.response // self._plan.num_generations, len(prompt) - 1)
            for prompt, graded in zip(prompts, responses, strict=True)
        ]
        units = [range(start, start + self._size) for start in range(0, len(responses), self._size)]
        taken = [together(lengths[unit.start : unit.stop], shared[unit.start], packed=self._packed) for unit in units]
        dealt = dealt_passes(
            taken,
            self._tokens_max,
            self._ranks.world_size,
            packed=self._packed,
            prompts=[shared[unit.start] for unit in units],
        )
        for its_units in dealt[self._ranks.rank]:
            if not its_units:
                yield idle_batch(self._ranks.device)
                continue
            part = [index for unit in its_units for index in units[unit]]
            tokens = [self._batches.tokens(responses[index]) for index in part]
            self._versions |= {each.response: _sampled_versions(each) for each in tokens}
            yield collate(
                [each.response for each in tokens],
                [prompts[index] for index in part],
                [each.token_ids.tolist() for each in tokens],
                [each.logprobs.tolist() for each in tokens],
                [each.origins for each in tokens],
            )

    def weight_versions(self, batch: TokenBatch) -> npt.NDArray[np.uint32]:
        """The weight version that sampled each token inside a pass's mask, [tokens], response by response."""
        return np.concatenate([self._versions[response] for response in batch.responses])


def _sampled_versions(response: Assembled) -> npt.NDArray[np.uint32]:
    """The weight versions of the tokens that the policy sampled."""
    is_policy = np.repeat(np.arange(len(response.origins)) % 2 == 0, response.origins)
    versions: npt.NDArray[np.uint32] = response.weight_versions[is_policy]
    return versions
