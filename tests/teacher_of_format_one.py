"""What a teacher leaves in the run of format 1: its configuration, and its scores of the two responses."""

import numpy as np

from storage.records.teacher_scores import ScoredResponse

CONFIGURATION = {"model_type": "none", "vocab_size": 2}


def scored(response: int, tokens: int) -> ScoredResponse:
    """Scores with heads of two tokens, of which every third one agrees."""
    places = np.arange(tokens)
    head = -np.linspace(0.25, 8.0, 2 * tokens, dtype=np.float32).reshape(tokens, 2)
    return ScoredResponse(
        response=response,
        teacher="teacher",
        logprobs=head[:, 1].copy(),
        agrees=places % 3 == 0,
        head_ids=np.stack([places, places + 1], axis=1).astype(np.uint32),
        head_logprobs=head,
    )


SCORES = (scored(0, 5), scored(1, 2))
