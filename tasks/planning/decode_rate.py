"""How fast a member decodes by batch size, measured while it works; and from where on a larger batch no longer pays."""

STEPS_MIN = 8
SMOOTHING = 0.1
FLAT = 0.95


class DecodeRate:
    """Step times by number of responses in flight, each a moving average of the steps seen."""

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def record(self, batch: int, duration_s: float) -> None:
        """One decode step of `batch` responses."""
        seen = self._steps.get(batch, 0)
        self._steps[batch] = seen + 1
        weight = max(SMOOTHING, 1 / (seen + 1))
        before_s = self._step_s.get(batch, duration_s)
        self._step_s[batch] = before_s + weight * (duration_s - before_s)

    def plateau(self) -> int:
        """The smallest batch that decodes as many tokens per second as the best, within 5 %; 0 while not known.

        Known once batches were seen of which one is twice another (RLBoost, arXiv 2510.19225, section 4.2.1, takes it
        from a profile of the step before).
        """
        known = self._known()
        if not known or max(known) < 2 * min(known):
            return 0
        rates = {batch: batch / step_s for batch, step_s in known.items()}
        enough = FLAT * max(rates.values())
        return min(batch for batch, rate in rates.items() if rate >= enough)

    def per_response(self, batch_max: int) -> tuple[float, ...]:
        """Tokens per second of one response, by batch size from 0 (meaningless) to batch_max; empty while not known.

        Between measured sizes the nearest one counts, and a step is taken to grow no faster than its batch.
        """
        known = self._known()
        if not known:
            return ()
        return tuple(1.0 / self._expected_step_s(known, max(1, batch)) for batch in range(batch_max + 1))

    def _known(self) -> dict[int, float]:
        # A copy in one step: another thread may be recording.
        return {b: s for b, s in list(self._step_s.items()) if self._steps[b] >= STEPS_MIN and s > 0}

    def _expected_step_s(self, known: dict[int, float], batch: int) -> float:
        nearest = min(known, key=lambda measured: abs(measured - batch))
        return known[nearest] * max(1.0, batch / nearest)
