"""Length prediction: the predictors of each group's response lengths, and the choice of a predictor.

"history" knows each prompt's lengths from earlier epochs (RLHFless, arXiv 2602.22718, section 4.3), "ranker" learns the
order of prompts (StreamRL; tasks/planning/ranker.py), "none" expects equal lengths. Every iteration scores every
predictor, in use or not. Pure: the state is a LengthTable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from storage.records.length_tables import PREDICTORS, PROMPTS_MAX, QUANTILES, LengthTable
from tasks.configuration.planning import PlanningConfig
from tasks.planning.capacity import GroupLengths
from tasks.planning.log_normal import high_of
from tasks.planning.prompt_features import PromptFeatures
from tasks.planning.ranker import scores, trained

# Weight of the newest epoch in a prompt's history, a window of three (alpha = 2 / (window + 1)). RLHFless finds windows
# of one to four equally good; a group's mean is of few responses, so a longer window is less noisy.
ALPHA = 0.5
# A predictor is used if it found at least this share of the longest fifth of groups; chance finds 0.2.
RECALL_MIN = 0.3
LONGEST_SHARE = 0.2
Floats = npt.NDArray[np.float64]
_POINTS = (np.arange(QUANTILES) + 0.5) / QUANTILES


@dataclass(frozen=True, kw_only=True)
class LengthScore:
    """The scores of one predictor in one iteration.

    Attributes:
        recall: share of the longest groups found (recall_of_longest).
        rank_correlation: Spearman's correlation of expected and actual order (rank_correlation).
    """

    recall: float
    rank_correlation: float


def choose_predictor(recalls: Mapping[str, Sequence[float]], settings: PlanningConfig) -> str:
    """The predictor to use for the next iteration.

    "auto" takes the predictor with the best mean recall, if the mean reaches RECALL_MIN, and else "none". A
    named predictor is taken without a measurement. With measurements, its mean must reach RECALL_MIN; otherwise the
    next of PREDICTORS from RECALL_MIN on is taken, or "none". Predictors out of use are scored too, so a predictor
    returns when its recall has recovered.

    Args:
        recalls: by predictor, the recalls of the last iterations with a measurement.
        settings: section `planning` of the configuration.
    """
    means = {name: float(np.mean(recalls[name])) for name in PREDICTORS if len(recalls.get(name, ()))}
    named = settings.length_predictor
    if named == "auto":
        useful = [name for name in PREDICTORS[:-1] if name in means]
        # Of equal ones the first, which is the stronger.
        order = sorted(useful, key=lambda name: -means[name])
    else:
        if named not in means:
            return named
        order = [name for name in PREDICTORS[PREDICTORS.index(named) : -1] if name in means]
    return next((name for name in order if means[name] >= RECALL_MIN), "none")


def recent_recalls(table: LengthTable) -> dict[str, list[float]]:
    """Recalls by predictor in the last iterations, the newest last; unmeasured ones are left out."""
    return {
        name: [float(value) for value in row if not np.isnan(value)]
        for name, row in zip(PREDICTORS, table.recall, strict=True)
    }


def predict(predictor: str, table: LengthTable, prompts: PromptFeatures, length_max: int) -> GroupLengths:
    """The lengths that `predictor` expects of these prompts' groups, in tokens from 1 to length_max.

    With an empty table every predictor acts as "none" and expects half of length_max. Raises ValueError for an unknown
    predictor.
    """
    if predictor not in PREDICTORS:
        raise ValueError(f"predictor: value {predictor!r}; allowed: {', '.join(PREDICTORS)}")
    high = None
    if not table.learned:
        predictor, expected = "none", np.full(len(prompts), length_max / 2)
    elif predictor == "none":
        expected = np.full(len(prompts), table.quantiles.mean())
    elif predictor == "ranker":
        expected = _ranked(table, prompts)
    else:
        expected, high = _remembered(table, prompts)
    ratio = table.high_ratio[PREDICTORS.index(predictor)] if table.learned else 2.0
    ratios = expected * max(1.0, float(ratio))
    high = ratios if high is None else np.where(np.isnan(high), ratios, high)
    expected = np.clip(expected, 1.0, float(length_max))
    return GroupLengths(predictor, expected, np.clip(high, expected, float(length_max)))


def learn(
    table: LengthTable, prompts: PromptFeatures, lengths: Floats, *, iteration: int, length_max: int
) -> tuple[LengthTable, dict[str, LengthScore]]:
    """The table after an iteration, and the scores of each predictor's expectations from the given table.

    Fewer than two groups are not scored. A predictor with nothing learned acts as "none" and is not scored under its
    own name. Raises ValueError if `lengths` and `prompts` differ in the number of groups.

    Args:
        table: the table at the start of the iteration.
        prompts: features of the prompts of the n groups whose responses have all ended.
        lengths: response lengths, [n, samples] tokens.
        iteration: number of the iteration.
        length_max: limit of a response's length in tokens.
    """
    if lengths.ndim != 2 or len(lengths) != len(prompts):
        raise ValueError(f"lengths: shape {lengths.shape}; allowed: ({len(prompts)}, samples)")
    if not len(prompts):
        return replace(table, iteration=iteration), {}
    means = lengths.mean(axis=1)
    found = {name: predict(name, table, prompts, length_max) for name in PREDICTORS}
    scored = {
        name: score(expected.expected, means)
        for name, expected in found.items()
        if len(prompts) > 1 and expected.predictor == name
    }
    # Before anything is learned, expectations do not have the scale of these responses.
    overall = max(1.0, means.mean())
    scales = [expected.expected[:, None] if table.learned else overall for expected in found.values()]
    ratios = [np.quantile(lengths / scale, 0.9) for scale in scales]
    keep = 1 - ALPHA if table.learned else 0.0
    weights, squares = trained(table.weights, table.squares, prompts, means)
    return replace(
        _with_history(table, prompts, lengths, iteration),
        iteration=iteration,
        learned=table.learned + 1,
        quantiles=keep * table.quantiles + (1 - keep) * np.quantile(means, _POINTS),
        weights=weights,
        squares=squares,
        high_ratio=keep * table.high_ratio + (1 - keep) * np.array(ratios),
        recall=_shifted(table.recall, {name: item.recall for name, item in scored.items()}),
        rank_correlation=_shifted(
            table.rank_correlation, {name: item.rank_correlation for name, item in scored.items()}
        ),
    ), scored


def score(expected: npt.ArrayLike, means: npt.ArrayLike) -> LengthScore:
    """The scores of the lengths expected of groups, given their real mean lengths."""
    return LengthScore(recall=recall_of_longest(expected, means), rank_correlation=rank_correlation(expected, means))


def _ranked(table: LengthTable, prompts: PromptFeatures) -> Floats:
    """Expected length of each prompt: the quantile of earlier groups' lengths at the prompt's place in the ranking."""
    order = (ranks(scores(table.weights, prompts)) - 0.5) / len(prompts)
    expected: Floats = np.interp(order, _POINTS, table.quantiles)
    return expected


def _remembered(table: LengthTable, prompts: PromptFeatures) -> tuple[Floats, Floats]:
    """(expected, high) of each prompt from its history; a prompt without history gets the ranker's length, and NaN."""
    places, known = _places(table.prompts, prompts.digests)
    expected = _ranked(table, prompts)
    high = np.full(len(prompts), np.nan)
    expected[known] = table.mean[places[known]]
    high[known] = high_of(expected[known], table.deviation[places[known]].astype(np.float64))
    return expected, high


def _with_history(table: LengthTable, prompts: PromptFeatures, lengths: Floats, iteration: int) -> LengthTable:
    """The table with each prompt's averages after the iteration; of several groups of a prompt, the last counts."""
    digests, places = np.unique(prompts.digests[::-1], return_index=True)
    groups = lengths[::-1][places]
    places, known = _places(table.prompts, digests)
    seen = places[known]
    alpha = np.ones(len(digests))
    alpha[known] = ALPHA
    before, variance = np.zeros(len(digests)), np.zeros(len(digests))
    before[known] = table.mean[seen]
    variance[known] = np.nan_to_num(table.deviation[seen].astype(np.float64)) ** 2
    shift = np.where(known, groups.mean(axis=1) - before, 0.0)
    # The variance of a mixture of the past and this epoch: their variances, and the variance of their means.
    variance = (1 - alpha) * (variance + alpha * shift**2) + alpha * groups.var(
        axis=1, ddof=min(1, groups.shape[1] - 1)
    )
    count = np.ones(len(digests), dtype=np.uint32)
    count[known] += table.count[seen]
    mean = (1 - alpha) * before + alpha * np.maximum(groups.mean(axis=1), 1.0)
    single = (count == 1) & (groups.shape[1] == 1)
    rest = ~np.isin(table.prompts, digests)
    last_seen = np.full(len(digests), iteration, dtype=np.uint32)
    merged = {
        "prompts": np.concatenate([table.prompts[rest], digests]),
        "mean": np.concatenate([table.mean[rest], mean.astype(np.float32)]),
        "deviation": np.concatenate(
            [table.deviation[rest], np.where(single, np.nan, np.sqrt(variance)).astype(np.float32)]
        ),
        "count": np.concatenate([table.count[rest], count]),
        "last_seen": np.concatenate([table.last_seen[rest], last_seen]),
    }
    newest = np.lexsort((merged["prompts"], -merged["last_seen"].astype(np.int64)))[:PROMPTS_MAX]
    order = newest[np.argsort(merged["prompts"][newest])]
    return replace(
        table,
        prompts=merged["prompts"][order],
        mean=merged["mean"][order],
        deviation=merged["deviation"][order],
        count=merged["count"][order],
        last_seen=merged["last_seen"][order],
    )


def _places(
    known: npt.NDArray[np.uint64], wanted: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(the index of each wanted digest in `known`, True where `known` holds the digest); `known` is ascending."""
    places = np.searchsorted(known, wanted)
    places = np.minimum(places, max(0, known.size - 1))
    return places, (known[places] == wanted) if known.size else np.zeros(wanted.size, dtype=bool)


def _shifted(recent: Floats, newest: Mapping[str, float]) -> Floats:
    """The columns shifted by one with `newest` as the last column; unchanged without new scores."""
    column = [newest.get(name, np.nan) for name in PREDICTORS]
    return np.column_stack([recent[:, 1:], column]) if newest else recent


def recall_of_longest(expected: npt.ArrayLike, actual: npt.ArrayLike, share: float = LONGEST_SHARE) -> float:
    """Of the k groups expected to be the longest, the share that is at least as long as the k-th longest.

    The score of StreamRL's ranker (arXiv 2504.15930, section 4.2). Groups that tie with the k-th longest count as
    right. If expectations tie, the score is the mean over all orders of the ties, so a predictor with equal
    expectations scores like chance: k of n if no lengths tie. Raises ValueError without groups, and for arrays of
    different lengths.

    Args:
        expected: expected length of each group, [groups].
        actual: actual length of each group, [groups].
        share: k as a share of the groups, rounded, at least one group.
    """
    wanted, found = _pair(expected, actual)
    k = max(1, round(share * wanted.size))
    right = found >= np.partition(found, -k)[-k]
    threshold = np.partition(wanted, -k)[-k]
    named, ties = wanted > threshold, wanted == threshold
    left = k - named.sum()
    return float((right[named].sum() + left * right[ties].sum() / ties.sum()) / k)


def rank_correlation(expected: npt.ArrayLike, actual: npt.ArrayLike) -> float:
    """Spearman's rank correlation, with ties at their mean rank; 0 if all values of either side are equal.

    Raises what `recall_of_longest` raises.
    """
    sides = [ranks(side) for side in _pair(expected, actual)]
    x, y = (side - side.mean() for side in sides)
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else 0.0


def ranks(values: npt.ArrayLike) -> Floats:
    """The rank of each value from 1, ascending; equal values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = (last - (counts - 1) / 2)[inverse]
    return mean


def _pair(expected: npt.ArrayLike, actual: npt.ArrayLike) -> tuple[Floats, Floats]:
    wanted, found = (np.asarray(side, dtype=np.float64) for side in (expected, actual))
    if wanted.ndim != 1 or wanted.shape != found.shape or not wanted.size:
        raise ValueError(
            f"expected, actual: shapes {wanted.shape}, {found.shape}; allowed: equal, of one group or more"
        )
    return wanted, found
