"""Speculation: how an engine asks a drafter, counts what its drafts were worth, and chooses how many to verify.

No token depends on the number of drafts, so a clock may choose it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from storage.records.draft_totals import DraftTotals
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.draft_counts import DraftCounts
from tasks.sampling.engines.drafter import WIDTHS, Drafter, Remembers
from tasks.sampling.engines.engine import EngineError, GenerationRequest, TokenDelta
from tasks.sampling.engines.plain_decoding import PlainDecoding

# Whether drafts would pay is seen anew every so many steps, which ask for drafts of a few responses in any case.
_LOOK_EVERY = 16
_LOOK_AT = 32


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
        self._counts = DraftCounts()
        self._asks = False
        self._asked: dict[int, Sequence[int]] = {}
        self._width = 1
        self._began_s = 0.0
        self._steps = 0
        self._plain = PlainDecoding(self._counts.times)
        self._spent_s = 0.0

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """These responses come into flight."""
        with self._beside():
            self._drafter.start(requests)
            self._plain.start(request.response for request in requests)

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
            asked_s, self._began_s = self._began_s, self._now_s()  # what asking took is no part of a plain step
            self._spent_s += self._began_s - asked_s
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
        looks, rest = divmod(self._steps, _LOOK_EVERY)
        if not rest:
            self._asks = self._counts.worth_asking(len(responses))
        if self._asks:
            return responses
        first = looks * _LOOK_AT % len(responses)
        return () if rest else responses[first : first + _LOOK_AT]

    def settle(self, deltas: Sequence[TokenDelta]) -> None:
        """Take in what the step with the last drafts gave, for every response in flight."""
        took_s, before = self._now_s() - self._began_s, self.totals
        found = {delta.response: len(delta.token_ids) for delta in deltas}
        ended = [delta.response for delta in deltas if delta.finish_reason is not None]
        self._spent_s += took_s
        self._steps += 1
        with self._beside():
            self._counts.took(len(deltas), self._width, took_s)
            counted = [self._count(delta) for delta in deltas if delta.response in self._asked]
            self._drafter.extend({delta.response: delta.token_ids for delta in deltas})
            self._forget(ended)
            self._plain.follow(found, ended, took_s, plain=self._width == 1)
        plain_s = self._plain.seconds
        # A new object, because other threads read the totals.
        self.totals = DraftTotals(
            steps=before.steps + len(deltas),
            tokens=before.tokens + sum(found.values()),
            drafted=before.drafted + sum(drafted for drafted, _ in counted),
            accepted=before.accepted + sum(accepted for _, accepted in counted),
            saved_s=None if plain_s is None else plain_s - self._spent_s,
        )

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
