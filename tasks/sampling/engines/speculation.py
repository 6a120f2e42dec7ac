"""Speculation: how an engine asks a drafter, counts what its drafts were worth, and chooses how many to verify.

No token depends on the number of drafts, so a clock may choose it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from storage.records.draft_totals import DraftTotals
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.admission import tokens_left
from tasks.sampling.engines.draft_counts import DraftCounts
from tasks.sampling.engines.drafter import WIDTHS, Computes, Drafter, Remembers
from tasks.sampling.engines.engine import EngineError, TokenDelta
from tasks.sampling.engines.plain_decoding import PlainDecoding
from tasks.sampling.engines.slot_table import Slot

# Asking without verifying may take this share of the time, and while drafts pay also what they have saved, both of the
# last 1000 steps or so.
_ASKING_MAX, _DECAY = 0.001, 0.999
# Measuring takes time, too, so of steps without drafts one in so many is measured.
_MEASURED_EVERY = 4
# While drafts do not pay, so many responses are asked for, to see how drafts do.
_LOOK_AT = 16
# Without measured steps a look can show nothing.
_FIRST_LOOK = 16


class Speculation:
    """A drafter, and the rule for the number of drafts; `drafts` and `settle` take turns.

    Attributes:
        totals: what drafts were worth so far. `saved_s` is the seconds of PlainDecoding, less those of the steps taken,
            of the drafter, and of the counts.
    """

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
        self.totals = DraftTotals()
        self._drafter = drafter
        self._fixed = None if drafts == "auto" else drafts
        self._now_s = now_s
        self._computes = drafter if isinstance(drafter, Computes) else None
        self._counts = DraftCounts(computes=self._computes is not None)
        self._pays = False
        self._credit_s = 0.0
        self._first = 0
        self._asked: dict[int, Sequence[int]] = {}
        self._width = 1
        self._began_s = self._drafted_s = 0.0
        self._steps = 0
        self._plain = PlainDecoding(self._counts.times)
        self._spent_s = 0.0

    def start(self, slots: Sequence[Slot]) -> None:
        """These responses come into flight; the engine appends to their tokens."""
        with self._beside():
            self._drafter.start([slot.request for slot in slots], [slot.token_ids for slot in slots])
            self._plain.start(slot.request.response for slot in slots)

    def leave(self, responses: Sequence[int]) -> None:
        """These responses are aborted."""
        with self._beside():
            self._forget(responses)
            self._plain.leave(responses)

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Remembers`. A drafter without that ability is not told."""
        if isinstance(self._drafter, Remembers):
            with self._beside():
                self._drafter.remember(prompt_ids, responses)

    def restart(self) -> None:
        """See `Computes`. A drafter that computes nothing is not told."""
        if self._computes is not None:
            self._computes.restart()

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
        self._drafted_s = 0.0
        if most > 0:
            found = self._drafter.draft(asked, most)
            self._asked = {r: _checked(tokens, most, vocab_size) for r, tokens in zip(asked, found, strict=True)}
            if self._computes is not None:
                self._drafted_s = self._now_s() - self._began_s
                self._counts.computed(len(asked), self._computes.pass_s or self._drafted_s / most)
            self._width = self._chosen([slot.request.response for slot in live])
        if self._width == 1:
            if self._asked:
                now_s = self._now_s()
                self._credit_s -= now_s - self._began_s
                self._spent_s += now_s - self._began_s
                self._began_s, self._drafted_s = now_s, 0.0  # what asking took is no part of a plain step
            return [()] * len(live)
        fill = [0] * (self._width - 1)
        return [(*self._asked.get(slot.request.response, ()), *fill)[: self._width - 1] for slot in live]

    def _whom(self, live: Sequence[Slot]) -> Sequence[int]:
        """The responses whose drafts are asked for: all if drafts may pay, and sometimes a few, to see how they do."""
        if self._fixed is None:
            if (self._credit_s < 0 and self._counts.knows_drafts) or self._steps < _FIRST_LOOK:
                return ()
            if self._pays and self._computes is not None:
                # What is asked of it is paid, whether verified or not.
                self._reconsider(len(live))
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
        if self._computes is not None and self._fixed is None:
            # To see how drafts do, one is enough.
            return min(room, self._counts.worth(len(live)) if self._pays else 1)
        return min(room, DRAFTS_MAX if self._fixed is None else self._fixed)

    def _chosen(self, responses: Sequence[int]) -> int:
        """The width of a step for which drafts are at hand."""
        lengths = {response: len(self._asked.get(response, ())) for response in responses}
        if self._fixed is not None or (self._computes is not None and self._pays):
            chosen = max(lengths.values())
        else:
            chosen = 0 if self._computes is not None else self._counts.best(lengths)
        if not chosen and self._pays:
            self._reconsider(len(responses))
        return next(width for width in WIDTHS if width > chosen)

    def _reconsider(self, responses: int) -> None:
        self._pays = self._counts.worth_asking(responses)
        if not self._pays:
            self._credit_s = min(self._credit_s, 0.0)  # what was saved pays for no looks

    def settle(self, deltas: Sequence[TokenDelta]) -> None:
        """Take in what the step with the last drafts gave, for every response in flight."""
        ended_s, before = self._now_s(), self.totals
        took_s, is_plain = ended_s - self._began_s, self._width == 1
        ended = [delta.response for delta in deltas if delta.finish_reason is not None]
        self._spent_s += took_s
        self._credit_s = _DECAY * self._credit_s + _ASKING_MAX * took_s
        self._steps += 1
        tokens, counted = len(deltas), list[tuple[int, int]]()
        if is_plain and not ended and not self._asked:
            measured = not self._steps % _MEASURED_EVERY
            if measured:
                self._counts.took(len(deltas), 1, took_s, tokens)
            self._plain.follow_alike(len(deltas), took_s, measured=measured)
        else:
            with self._beside():
                found = {delta.response: len(delta.token_ids) for delta in deltas}
                tokens = sum(found.values())
                saved_s = self._counts.took(len(deltas), self._width, took_s - self._drafted_s, tokens)
                self._credit_s += 0.0 if is_plain else saved_s
                counted = [self._count(delta) for delta in deltas if delta.response in self._asked]
                if counted and is_plain:
                    self._credit_s -= self._now_s() - ended_s
                    self._see(len(deltas))
                if ended:
                    self._forget(ended)
                self._plain.follow(found, ended, took_s, plain=is_plain)
        plain_s = self._plain.seconds
        # A new object, because other threads read the totals.
        self.totals = DraftTotals(
            steps=before.steps + len(deltas),
            tokens=before.tokens + tokens,
            drafted=before.drafted + sum(drafted for drafted, _ in counted),
            accepted=before.accepted + sum(accepted for _, accepted in counted),
            saved_s=None if plain_s is None else plain_s - self._spent_s,
        )

    def _see(self, responses: int) -> None:
        """After a look: if drafts pay, all responses are asked for at once, whatever the look took."""
        if self._fixed is None and not self._pays and self._counts.worth_asking(responses):
            self._pays, self._credit_s = True, max(self._credit_s, 0.0)

    def _forget(self, responses: Sequence[int]) -> None:
        self._drafter.leave(responses)
        self._counts.leave(responses)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is done in the block costs seconds that plain decoding does not."""
        began_s = self._now_s()
        yield
        self._spent_s += self._now_s() - began_s

    def _count(self, delta: TokenDelta) -> tuple[int, int]:
        """The drafts of a response that the step verified, and how many were right."""
        # Without drafts in the step only the first one can be compared.
        asked = self._asked[delta.response][: max(1, self._width - 1)]
        right = 0
        for draft, token in zip(asked, delta.token_ids, strict=False):
            if draft != token:
                break
            right += 1
        compared = min(right + 1, len(asked), len(delta.token_ids))
        self._counts.drafted(delta.response, right, compared)
        return (len(asked), right) if self._width > 1 else (0, 0)


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
