"""A line of benchmarks.seeds for one published figure: theirs, ours, and whether ours is within the bound."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting import Measured, Target

# One bound for all figures: a ratio is reproduced if it is within 15 % of the published one, and a share of an overhead
# (which is a difference of two such ratios) if it is within 0.15 of it.
RATIO_OFF_MAX = 0.15
SHARE_OFF_MAX = 0.15


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table.

    published: the paper's figure; None if it has none. to: the other end if the paper gives a range. mark: its source,
    as in scenarios/. share: it is a share, not a ratio. fitted: a knob was fitted to it, so that it is
    neither a prediction nor a target. follows: the figures from which it follows by arithmetic, so that it is no
    evidence of its own. least, most: bounds for a figure that is not published. interval: of `ours` over seeds; the
    whole of it must keep the bounds.
    """

    paper: str
    what: str
    ours: float
    published: float | None = None
    to: float | None = None
    mark: str = ""
    share: bool = False
    fitted: bool = False
    follows: str = ""
    least: float | None = None
    most: float | None = None
    interval: tuple[float, float] | None = None
    comment: str = ""

    @property
    def off(self) -> float | None:
        """The distance from the published figure, or from the nearer end of its range; relative for ratios."""
        return None if self.published is None else self._off(self.ours, self.published)

    @property
    def no_effect(self) -> bool:
        """Whether "no effect", a ratio of 1 or a share of 0, would be as near to what is published as is allowed.

        A range that begins at 0 is of no ratio.
        """
        if not self.published:
            return False
        return self._off(0.0 if self.share else 1.0, self.published) <= self.off_max

    def _off(self, figure: float, published: float) -> float:
        nearest = min(max(figure, published), published if self.to is None else self.to)
        return abs(figure - nearest) / (1 if self.share else nearest)

    @property
    def verdict(self) -> str:
        if self.off is None:
            bounded = self.target()
            return "" if bounded is None else "reached" if bounded.met else "missed"
        inside = "inside" if self.off <= self.off_max else "outside"
        return f"fitted, {inside}" if self.fitted else inside

    @property
    def off_max(self) -> float:
        return SHARE_OFF_MAX if self.share else RATIO_OFF_MAX

    def row(self) -> dict[str, Any]:
        published = "" if self.published is None else f"{self.published:.3g}"
        if self.to is not None:
            published += f" to {self.to:.3g}"
        return {
            "paper": self.paper,
            "what": self.what,
            "published": f"{published} {self.mark}".strip(),
            "ours": self.ours if self.interval is None else Measured(self.ours, self.interval),
            "verdict": self.verdict,
            "but": "; ".join(self._reservations()),
            "comment": self.comment,
        }

    def _reservations(self) -> Iterator[str]:
        """What makes the verdict say less."""
        if self.follows:
            yield f"follows from {self.follows}"
        if self.no_effect:
            yield "no effect would be inside"

    def target(self) -> Target | None:
        """The distance against its bound, or the figure against its own bound; None if there is neither."""
        if self.least is not None:
            return Target(f"{self.paper}: {self.what}", round(self.ours, 4), f">= {self.least}", self.interval)
        if self.most is not None:
            return Target(f"{self.paper}: {self.what}", round(self.ours, 4), f"<= {self.most}", self.interval)
        if self.off is None or self.fitted:
            return None
        return Target(f"{self.paper}: {self.what}: off by", round(self.off, 4), f"<= {self.off_max}")


def summary(found: Sequence[Finding]) -> str:
    """How many published figures are inside the bound, and how many of these say something.

    Fitted figures are no predictions, and are counted by themselves.
    """
    published = [one for one in found if one.off is not None]
    predicted = [one for one in published if not one.fitted]
    inside = [one for one in predicted if one.verdict == "inside"]
    telling = [one for one in inside if not one.follows and not one.no_effect]
    return (
        f"{len(inside)} of {len(predicted)} published figures that nothing was fitted to are inside; of these "
        f"{sum(bool(one.follows) for one in inside)} follow from others by arithmetic, and "
        f"{sum(one.no_effect for one in inside)} would be met by no effect, which leaves {len(telling)}; besides "
        f"{sum(one.fitted for one in published)} fitted, of which "
        f"{sum(one.verdict == 'fitted, inside' for one in published)} are inside"
    )
