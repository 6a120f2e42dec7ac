"""What stands for the scores of a token in the journal of scorers."""

import numpy as np
import torch

from storage.journal.assembly import Assembled
from storage.journal.journal import PendingRows
from storage.journal.shard import Finish
from tasks.learning.distillation import TokenScores
from tasks.learning.score_journal import append_scores, policy_tokens


def test_observations_are_not_among_the_scored_tokens():
    tokens = np.arange(9, dtype=np.uint32)
    response = Assembled(0, tokens, tokens[:0], Finish.STOP, (), (), tokens, (2, 3, 1, 2, 1), (), False, 0)
    assert policy_tokens(response).tolist() == [0, 1, 5, 8]
    logprobs, agrees = torch.arange(4.0), torch.tensor([True, False, True, False])
    scores = TokenScores(logprobs, agrees, torch.tensor([[0], [7], [5], [7]]), -torch.arange(4.0)[:, None])
    pending = PendingRows()
    append_scores(pending, 3, 1, policy_tokens(response), scores, range(1, 3), b"")
    append_scores(pending, 3, 1, policy_tokens(response), scores, range(3, 4), b"")
    [row] = pending.rows(0)
    assert (row.response, row.start, row.finish) == (3, 2, Finish.STOP)
    assert row.token_ids.tolist() == [1, 7, 5, 5, 8, 7]
    assert row.logprobs.tolist() == [1, -1, 2, -2, 3, -3]
