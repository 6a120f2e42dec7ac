"""Speculation: how an engine asks a drafter, counts what its drafts were worth, and chooses how many to verify.

No token depends on the number of drafts, so a clock may choose it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.draft_counts import DraftCounts
from tasks.sampling.engines.drafter import WIDTHS, Drafter, Remembers
from tasks.sampling.engines.engine import EngineError, GenerationRequest, TokenDelta

# Whether drafts would pay is seen anew every so many steps, which ask for drafts of a few responses in any case.
_LOOK_EVERY = 16
_LOOK_AT = 32


@dataclass(slots=True)
class SpeculationTotals:
    """What an engine has done so far.

    Attributes:
        steps: the number of steps.
        tokens: the tokens that the steps gave.
        drafted: the drafts that were verified, less those that fill a step's shape up.
        accepted: how many of them were right and are tokens of a response.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Speculation:
    """A drafter, and the rule for the number of drafts; `drafts` and `settle` take turns."""

    def __init__(
        self,
        drafter: Drafter,
        drafts: int | Literal["auto"] = "auto",
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make one for one engine.

        Args:
            drafter: what guesses tokens.
            drafts: the most drafts for a response in a step, 0 to DRAFTS_MAX; "auto" follows the times of steps and
                the share of right drafts.
            now_s: the clock of the times of steps.

        Raises:
            EngineError: `drafts` is out of range.
        """
        if drafts != "auto" and not 0 <= drafts <= DRAFTS_MAX:
            raise EngineError(f"drafts: value {drafts}; allowed: auto, 0..{DRAFTS_MAX}")
        self.totals = SpeculationTotals()
        self._drafter = drafter
        self._fixed = None if drafts == "auto" else drafts
        self._now_s = now_s
        self._counts = DraftCounts()
        self._asks = False
        self._asked: dict[int, Sequence[int]] = {}
        self._width = 1
        self._began_s = 0.0

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """These responses come into flight."""
        self._drafter.start(requests)

    def leave(self, responses: Sequence[int]) -> None:
        """These responses are in flight no more."""
        self._drafter.leave(responses)
        self._counts.leave(responses)

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Remembers`. A drafter without that ability is not told."""
        if isinstance(self._drafter, Remembers):
            self._drafter.remember(prompt_ids, responses)

    def drafts(self, responses: Sequence[int], room: int, vocab_size: int) -> list[Sequence[int]]:
        """Choose the drafts of the next step: equally many for each response, 0 or one less than a width.

        Args:
            responses: all responses in flight, in any order.
            room: the most drafts that any response could use.
            vocab_size: token ids of drafts are below it.
        """
        self._began_s = self._now_s()
        most = min(room, DRAFTS_MAX if self._fixed is None else self._fixed)
        asked = self._whom(responses) if most > 0 else ()
        self._asked, self._width = {}, 1
        if asked:
            found = self._drafter.draft(asked, most)
            self._asked = {r: _checked(tokens, most, vocab_size) for r, tokens in zip(asked, found, strict=True)}
            self._width = self._chosen(responses)
        if self._width == 1:
            self._began_s = self._now_s()  # what asking took is no part of a plain step
            return [()] * len(responses)
        fill = [0] * (self._width - 1)
        return [(*self._asked.get(response, ()), *fill)[: self._width - 1] for response in responses]

    def _chosen(self, responses: Sequence[int]) -> int:
        """The width of a step for which drafts are at hand."""
        lengths = {response: len(self._asked.get(response, ())) for response in responses}
        chosen = max(lengths.values()) if self._fixed is not None else self._counts.best(lengths)
        if not chosen and self._asks:
            self._asks = self._counts.worth_asking(len(responses))
        return next(width for width in WIDTHS if width > chosen)

    def _whom(self, responses: Sequence[int]) -> Sequence[int]:
        """The responses whose drafts are asked for: all if drafts may pay, and sometimes a few, to see how they do."""
        if self._fixed is not None:
            return responses
        looks, rest = divmod(self.totals.steps, _LOOK_EVERY)
        if not rest:
            self._asks = self._counts.worth_asking(len(responses))
        if self._asks:
            return responses
        first = looks * _LOOK_AT % len(responses)
        return () if rest else responses[first : first + _LOOK_AT]

    def settle(self, deltas: Sequence[TokenDelta]) -> None:
        """Take in what the step with the last drafts gave, for every response in flight."""
        self._counts.took(len(deltas), self._width, self._now_s() - self._began_s)
        self.totals.steps += 1
        self.totals.tokens += sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas:
            if delta.response in self._asked:
                self._count(delta)
        self._drafter.extend({delta.response: delta.token_ids for delta in deltas})
        self.leave([delta.response for delta in deltas if delta.finish_reason is not None])

    def _count(self, delta: TokenDelta) -> None:
        # Without drafts in the step only the first one can be compared.
        asked = self._asked[delta.response][: max(1, self._width - 1)]
        right = 0
        for draft, token in zip(asked, delta.token_ids, strict=False):
            if draft != token:
                break
            right += 1
        compared = min(right + 1, len(asked), len(delta.token_ids))
        self._counts.drafted(delta.response, right, compared)
        if self._width > 1:
            self.totals.drafted += len(asked)
            self.totals.accepted += right


def verified(
    drafts: Sequence[int], drawn: Iterable[tuple[int, float]], append: Callable[[int, float], TokenDelta]
) -> TokenDelta:
    """Append what was drawn after the last token and after each right draft, until the response ends.

    Args:
        drafts: the tokens that a step fed behind the response's last token.
        drawn: token and log-prob drawn after the last token and after each draft. Draws behind a wrong draft, and
            behind the response's end, count for nothing.
        append: adds a token and its log-prob to the response.
    """
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    for (token, logprob), draft in zip(drawn, (*drafts, -1), strict=True):
        last = append(token, logprob)
        tokens += last.token_ids
        logprobs += last.logprobs
        if last.finish_reason is not None or token != draft:
            break
    return TokenDelta(last.response, tokens, logprobs, last.finish_reason)


def _checked(tokens: Sequence[int], most: int, vocab_size: int) -> Sequence[int]:
    """The tokens until the first that is no token id."""
    strange = next((index for index, token in enumerate(tokens) if not 0 <= token < vocab_size), most)
    return tokens[: min(strange, most)]
