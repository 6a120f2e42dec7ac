"""Bugs of an engine that verifies drafts, to be put in the place of `speculation.verified`."""

from dataclasses import replace
from functools import partial

from tasks.sampling.engines.speculation import verified


def one_too_many(drafts, drawn, append):
    """Keeps the draw behind the first wrong draft."""
    drawn = list(drawn)
    right = next((i for i, (a, b) in enumerate(zip(drafts, drawn, strict=False)) if a != b[0]), len(drafts))
    if right < len(drafts):
        drafts = [*drafts[:right], drawn[right][0], *drafts[right + 1 :]]
    return verified(drafts, drawn, append)


def next_row(drafts, drawn, append):
    """Takes each log-prob from the next row."""
    tokens, logprobs = zip(*drawn, strict=True)
    return verified(drafts, zip(tokens, (*logprobs[1:], logprobs[0]), strict=True), append)


def stops_at_the_last(drafts, drawn, append):
    """Goes on behind a stop token that is not the last draw. `append` is an engine's method, given row and slot."""
    row, slot = append.args
    endless = replace(slot.request.sampling, stop_token_ids=())
    blind = partial(append.func, row, replace(slot, request=replace(slot.request, sampling=endless)))
    left = 1 + len(drafts)

    def on(token, logprob):
        nonlocal left
        left -= 1
        return (blind if left else append)(token, logprob)

    return verified(drafts, drawn, on)


WRONG_VERIFICATIONS = (one_too_many, next_row, stops_at_the_last)
