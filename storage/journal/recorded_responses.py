"""The responses of an iteration that its batches name, read whole and compared with what the batches say.

Every use of stored responses apart from training reads them here: other rewards, and other runs.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from storage.journal.compaction import read_responses, recorded
from storage.journal.responses import Response
from storage.records import layout
from storage.records.records import PlanRecord
from storage.stores.store import CorruptObject, ObjectStore

_NO_LOGPROBS = np.zeros(0, np.float32)


def recorded_responses(store: ObjectStore, plan: PlanRecord) -> Mapping[int, Response]:
    """The recorded responses without log-probs, by number; raises CorruptObject unless the batches say the same.

    Takes the memory of the iteration's tokens.
    """
    named, found = recorded(store, plan), {}
    for row in read_responses(store, plan.iteration):
        graded = named.get(row.response)
        said = None if graded is None else (graded.length, graded.policy_length, graded.reward, graded.rewards)
        if said != (len(row.token_ids), row.policy_length, row.reward, row.rewards):
            key = layout.responses(plan.iteration)
            raise CorruptObject(key, f"response {row.response} is not what the batches say")
        found[row.response] = replace(row, logprobs=_NO_LOGPROBS)
    if len(found) != len(named):
        key = layout.responses(plan.iteration)
        raise CorruptObject(key, f"{len(found)} responses are stored, and the batches name {len(named)}")
    return found
