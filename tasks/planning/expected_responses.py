"""The responses that an outline decodes: as long as those of the last iterations, and dealt as the planner deals."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tasks.crew_model.step_time import StepTime
from tasks.planning.decoding import Part
from tasks.planning.makespan import drawn_lengths
from tasks.planning.request import PlanningRequest

Floats = npt.NDArray[np.float64]

# About so many responses stand for all; at least one group does.
DECODED_MAX = 512
# How often lengths are drawn, so that their order statistics are means: fewer times for many responses.
DRAWS_MIN, DRAWS_MAX, DRAWN_RESPONSES = 1, 16, 1 << 13


class ExpectedResponses:
    """Responses that stand for all of the next iteration's, each for `weight` of them.

    lengths: [groups, num_generations] tokens, means of order statistics over several draws; groups in the order of
    training. order: the places in lengths, in the order in which they begin.
    """

    def __init__(self, request: PlanningRequest) -> None:
        self._request = request
        self._drawn = self._draws()
        # If their lengths are known, the longest groups come first.
        self._by_length = request.knows_lengths and request.settings.dispatch == "auto"
        self._uneven: dict[tuple[int, StepTime], float] = {}
        # All, ascending.
        self._sorted: Floats = np.sort(self._drawn.reshape(len(self._drawn), -1), axis=1).mean(axis=0)
        groups, size = self._drawn.shape[1:]
        lengths = self._alike(-(-groups * size // DECODED_MAX))
        self.weight = groups / len(lengths)
        # Groups are trained in any order.
        generator = np.random.default_rng(0)
        self.lengths: Floats = generator.permuted(generator.permutation(lengths, axis=0), axis=1)
        first = np.arange(len(lengths))
        if self._by_length:
            first = np.argsort(-self.lengths.sum(axis=1), kind="stable")
        self.order: npt.NDArray[np.intp] = np.arange(lengths.size).reshape(lengths.shape)[first].ravel()

    @cached_property
    def queue(self) -> list[float]:
        """Their lengths, in the order in which they begin."""
        return list(self.lengths.ravel()[self.order].tolist())

    def _draws(self) -> Floats:
        """[draws, groups, num_generations] lengths: of the last iterations, or, before there are any, expected ones.

        A crew stays for many iterations, whatever the next one's lengths are. Real lengths also have their real tail,
        and as much in common within a group as there is. An iteration counts as a draw, so that of many responses fewer
        iterations are used.
        """
        request = self._request
        responses = len(request.lengths) * request.num_generations
        draws = min(DRAWS_MAX, max(DRAWS_MIN, DRAWN_RESPONSES // responses))
        if request.past:
            return np.stack([seen.lengths for seen in request.past[:draws]])
        return drawn_lengths(request.lengths, request.num_generations, request.length_max, draws)

    def _alike(self, every: int) -> Floats:
        """The lengths of each `every`-th group by tokens, with as much in common within a group as all have."""
        within = np.sort(self._drawn, axis=2)[:, :, ::-1]
        by_tokens = np.argsort(-within.sum(axis=2), axis=1)
        means = np.take_along_axis(within, by_tokens[:, :, None], axis=1).mean(axis=0)[::every]
        # Means over draws are less spread than single lengths: the k-th longest gets the expected k-th longest length.
        ranks = np.argsort(np.argsort(-means, axis=None))
        places = (ranks * len(self._sorted)) // means.size
        lengths: Floats = self._sorted[::-1][places].reshape(means.shape)
        return np.asarray(lengths * (self._sorted.mean() / lengths.mean()))

    def unevenness(self, parts: Sequence[Part]) -> float:
        """How many times as long the member with the longest responses decodes as all would if they shared evenly.

        If none waits, members keep what they were dealt. If lengths are predicted, groups are dealt longest first, to
        the members from first to last and back again, as if the predictions were exact; else in turn.
        """
        draws, groups, size = self._drawn.shape
        members, room = (
            round(sum(n)) for n in zip(*((p.count, p.count * p.responses_max) for p in parts), strict=True)
        )
        if members < 2 or groups * size > room:
            return 1.0
        step_time = max(parts, key=lambda part: part.count).step_time
        key = members, step_time
        if key not in self._uneven:
            each = np.sort(self._dealt(members).reshape(draws, members, -1), axis=2)[:, :, ::-1]
            alone_s = (each @ step_time.rises(each.shape[2])).max(axis=1).mean()
            running = np.arange(groups * size, 0, -1)
            table = step_time.table(groups * size)
            step_s = np.interp(np.maximum(1.0, running / members), np.arange(len(table)), table)
            evenly_s = np.diff(self._sorted, prepend=0.0) @ step_s
            self._uneven[key] = max(1.0, float(alone_s / evenly_s))
        return self._uneven[key]

    def _dealt(self, members: int) -> Floats:
        """[draws, members, groups of a member, num_generations] lengths; 0 where a member has fewer groups."""
        draws, groups, size = self._drawn.shape
        rounds = -(-groups // members)
        dealt = np.zeros((draws, rounds * members, size))
        dealt[:, :groups] = self._drawn
        if self._by_length:
            longest_first = np.argsort(-self._drawn.sum(axis=2), axis=1)
            dealt[:, :groups] = np.take_along_axis(self._drawn, longest_first[:, :, None], axis=1)
        dealt = dealt.reshape(draws, rounds, members, size)
        if self._by_length:
            # To and fro, so that no member gets the longest of each round.
            dealt[:, 1::2] = dealt[:, 1::2, ::-1].copy()
        return dealt.swapaxes(1, 2)
