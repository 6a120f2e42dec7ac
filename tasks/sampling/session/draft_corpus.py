"""DraftCorpus: responses of other members and of an earlier epoch, on the way to an engine that drafts.

A group's other responses come from the journals that claims and looks have read anyway, and an earlier epoch's
responses from the thread of past_responses.py. The engine verifies every draft, so a response that is late, damaged or
missing costs steps, and never changes a token.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from storage.journal.shard import TokenIds
from storage.records.prompt_table import PromptRow
from tasks.sampling.engines.drafter import Remembers
from tasks.sampling.engines.engine import Engine

# Between two decode steps, for 2 ms: the drafter takes in about two million tokens a second.
_TOKENS_A_STEP = 1 << 12


class DraftCorpus:
    """Responses by group that no engine has taken in yet. Any thread may add some, and the decode lane feeds them."""

    def __init__(self, prompts: Sequence[PromptRow]) -> None:
        """prompts: the rows of the plan's prompts, by group."""
        self._prompts = prompts
        self._waiting: deque[tuple[int, TokenIds]] = deque()

    def extend(self, found: Iterable[tuple[int, TokenIds]]) -> None:
        """Add responses, each as its group and its token ids, uint32 [n]."""
        self._waiting.extend(found)

    def feed(self, engine: Engine) -> bool:
        """Hand some of the responses to the engine, so few that a step hardly becomes longer; returns if any are left.

        An engine without the ability is handed none.
        """
        if not isinstance(engine, Remembers):
            return False
        left = _TOKENS_A_STEP
        while self._waiting and left > 0:
            group, token_ids = self._waiting.popleft()
            engine.remember(self._prompts[group].token_ids, [token_ids.tolist()])
            left -= len(token_ids)
        return bool(self._waiting)
