"""Speculation: how an engine asks a drafter, counts what its drafts were worth, and chooses how many to verify.

No token depends on the number of drafts, so a clock may choose it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.admission import tokens_left
from tasks.sampling.engines.draft_counts import DraftCounts
from tasks.sampling.engines.drafter import WIDTHS, Drafter, Remembers
from tasks.sampling.engines.engine import EngineError, TokenDelta
from tasks.sampling.engines.slot_table import Slot

# Asking without verifying may take this share of the time, and while drafts pay also what they have saved, both of the
# last 1000 steps or so.
_ASKING_MAX, _DECAY = 0.001, 0.999
# Measuring takes time, too, so of steps without drafts one in so many is measured.
_MEASURED_EVERY = 4
# While drafts do not pay, so many responses are asked for, to see how drafts do.
_LOOK_AT = 16


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
        self._pays = False
        self._credit_s = 0.0
        self._first = 0
        self._asked: dict[int, Sequence[int]] = {}
        self._width = 1
        self._began_s = 0.0

    def start(self, slots: Sequence[Slot]) -> None:
        """These responses come into flight; the engine appends to their tokens."""
        self._drafter.start([slot.request for slot in slots], [slot.token_ids for slot in slots])

    def leave(self, responses: Sequence[int]) -> None:
        """These responses are in flight no more."""
        self._drafter.leave(responses)
        self._counts.leave(responses)

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Remembers`. A drafter without that ability is not told."""
        if isinstance(self._drafter, Remembers):
            self._drafter.remember(prompt_ids, responses)

    def drafts(self, live: Sequence[Slot], context_length: int, vocab_size: int) -> list[Sequence[int]]:
        """Choose the drafts of the next step: equally many for each response, 0 or one less than a width.

        Args:
            live: all responses in flight, in any order.
            context_length: the most tokens of prompt + response.
            vocab_size: token ids of drafts are below it.
        """
        asked = self._whom(live)
        most = self._most(live, context_length) if asked else 0
        self._asked, self._width, self._began_s = {}, 1, self._now_s()
        if most > 0:
            found = self._drafter.draft(asked, most)
            self._asked = {r: _checked(tokens, most, vocab_size) for r, tokens in zip(asked, found, strict=True)}
            self._width = self._chosen([slot.request.response for slot in live])
        if self._width == 1:
            if self._asked:
                now_s = self._now_s()
                self._credit_s -= now_s - self._began_s
                self._began_s = now_s  # what asking took is no part of a plain step
            return [()] * len(live)
        fill = [0] * (self._width - 1)
        return [(*self._asked.get(slot.request.response, ()), *fill)[: self._width - 1] for slot in live]

    def _whom(self, live: Sequence[Slot]) -> Sequence[int]:
        """The responses whose drafts are asked for: all if drafts may pay, and sometimes a few, to see how they do."""
        if self._fixed is None:
            if self._credit_s < 0:
                return ()
            self._pays = self._pays or self._counts.worth_asking(len(live))
            if not self._pays:
                self._first = (self._first + _LOOK_AT) % len(live)
                live = live[self._first : self._first + _LOOK_AT]
        elif not self._fixed:
            return ()
        return [slot.request.response for slot in live]

    def _most(self, live: Sequence[Slot], context_length: int) -> int:
        """The most drafts that any response could use: the last token of a response is never fed."""
        room = max(tokens_left(slot.request, slot.generated, context_length) for slot in live) - 1
        return min(room, DRAFTS_MAX if self._fixed is None else self._fixed)

    def _chosen(self, responses: Sequence[int]) -> int:
        """The width of a step for which drafts are at hand."""
        lengths = {response: len(self._asked.get(response, ())) for response in responses}
        chosen = max(lengths.values()) if self._fixed is not None else self._counts.best(lengths)
        if not chosen and self._pays:
            self._pays = self._counts.worth_asking(len(responses))
            if not self._pays:
                self._credit_s = min(self._credit_s, 0.0)  # what was saved pays for no looks
        return next(width for width in WIDTHS if width > chosen)

    def settle(self, deltas: Sequence[TokenDelta]) -> None:
        """Take in what the step with the last drafts gave, for every response in flight."""
        ended_s = self._now_s()
        taken_s, tokens = ended_s - self._began_s, len(deltas)
        self._credit_s = _DECAY * self._credit_s + _ASKING_MAX * taken_s
        if self._width > 1:
            tokens = sum(len(delta.token_ids) for delta in deltas)
            self._credit_s += self._counts.took(len(deltas), self._width, taken_s, tokens)
        elif not self.totals.steps % _MEASURED_EVERY:
            self._counts.took(len(deltas), 1, taken_s, tokens)
        self.totals.steps += 1
        self.totals.tokens += tokens
        if self._asked:
            for delta in deltas:
                if delta.response in self._asked:
                    self._count(delta)
            if self._width == 1:
                self._credit_s -= self._now_s() - ended_s
        ended = [delta.response for delta in deltas if delta.finish_reason is not None]
        if ended:
            self.leave(ended)

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
