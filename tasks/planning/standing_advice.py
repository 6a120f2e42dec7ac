"""Whether a trainer should stand: if restoring and writing its state takes enough of an iteration."""

# A standing trainer holds its machine between phases, which a train task does not; below this that may cost as much.
SHARE_MIN = 0.03


def advice_to_stand(placement: str, state_s: float, iteration_s: float) -> str:
    """One line that recommends trainer.placement "standing"; empty if the trainer keeps its state, or if it is small.

    state_s: seconds of an iteration in which the state is restored and written. iteration_s: of the whole iteration.
    """
    if placement not in ("own", "pod") or not iteration_s or state_s / iteration_s <= SHARE_MIN:
        return ""
    return (
        f"restoring and writing the trainer's state takes {state_s:.0f} s of an iteration of {iteration_s:.0f} s "
        f"({state_s / iteration_s:.0%}); trainer.placement 'standing' keeps it in memory (with planning.seeding 'off')"
    )
