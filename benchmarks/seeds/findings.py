"""A line of benchmarks.seeds for one published figure: theirs, ours, and whether ours is within the bound."""

from dataclasses import dataclass
from typing import Any

from benchmarks.reporting import Target

# One bound for all figures: a ratio is reproduced if it is within 15 % of the published one, and a share of an overhead
# (which is a difference of two such ratios) if it is within 0.15 of it.
RATIO_OFF_MAX = 0.15
SHARE_OFF_MAX = 0.15


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table.

    published: the paper's figure; None if it has none. to: the other end if the paper gives a range. mark: its source,
    as in scenarios/. share: it is a share, not a ratio. fitted: a knob was fitted to it, so that it is
    neither a prediction nor a target. least, most: bounds for a figure that is not published.
    """

    paper: str
    what: str
    ours: float
    published: float | None = None
    to: float | None = None
    mark: str = ""
    share: bool = False
    fitted: bool = False
    least: float | None = None
    most: float | None = None
    comment: str = ""

    @property
    def off(self) -> float | None:
        """The distance from the published figure, or from the nearer end of its range; relative for ratios."""
        if self.published is None:
            return None
        nearest = min(max(self.ours, self.published), self.published if self.to is None else self.to)
        return abs(self.ours - nearest) / (1 if self.share else nearest)

    @property
    def verdict(self) -> str:
        if self.off is None:
            if self.least is None and self.most is None:
                return ""
            enough = self.least is None or self.ours >= self.least
            return "reached" if enough and (self.most is None or self.ours <= self.most) else "missed"
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
            "ours": self.ours,
            "verdict": self.verdict,
            "comment": self.comment,
        }

    def target(self) -> Target | None:
        """The distance against its bound, or the figure against its own bound; None if there is neither."""
        if self.least is not None:
            return Target(f"{self.paper}: {self.what}", round(self.ours, 4), f">= {self.least}")
        if self.most is not None:
            return Target(f"{self.paper}: {self.what}", round(self.ours, 4), f"<= {self.most}")
        if self.off is None or self.fitted:
            return None
        return Target(f"{self.paper}: {self.what}: off by", round(self.off, 4), f"<= {self.off_max}")
