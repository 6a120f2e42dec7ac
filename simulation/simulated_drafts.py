"""The drafters of a simulated crew: each life of a member draws its own, so a kill changes the drafter.

Drafts take no time on a simulated machine, and must change nothing but the number of steps.
"""

import random
from collections.abc import Callable

from storage.clock import Clock
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.drafter import Drafter
from tasks.sampling.engines.scripted_drafter import Answer, ScriptedDrafter, changing, perfect, wrong
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter

# Most lives have a drafter that is often right, so that several tokens of a response come together.
SHARES: tuple[Callable[[int], float], ...] = (perfect, perfect, changing, wrong, lambda _: 0.5, lambda _: 0.8)
NONE, SUFFIXES = 0.15, 0.1


def draw_speculation(
    seed: int, name: str, answer: Answer, clock: Clock, *, vocab_size: int, rows: int, context_length: int
) -> Speculation | None:
    """The speculation of an engine of this name; None: the engine decodes without drafts.

    Args:
        seed: that of the history.
        name: that of the process or incarnation.
        answer: the tokens that decoding adds to a request.
        clock: the clock of the times of steps.
        vocab_size: as in the engine.
        rows: the most responses in flight.
        context_length: the most tokens of prompt + response.
    """
    rng = random.Random(f"drafts {seed} {name}")
    kind = rng.random()
    if kind < NONE:
        return None
    drafter: Drafter
    if kind < NONE + SUFFIXES:
        drafter = SuffixDrafter(rows=rows, context_length=context_length)
    else:
        share, ragged = rng.choice(SHARES), rng.random() < 0.5
        drafter = ScriptedDrafter(vocab_size, share, answer=answer, ragged=ragged, seed=rng.getrandbits(16))
    drafts = rng.choice(("auto", *range(1, DRAFTS_MAX + 1)))
    return Speculation(drafter, drafts, now_s=clock.monotonic)
