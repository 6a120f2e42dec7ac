"""A look for work: it is the same in every process."""

import math
import random

import numpy as np

from storage.records.records import SlotPlan
from tasks.crew_model.accounts import Account
from tasks.crew_model.crew_member import EngineModel, ModelMember
from tasks.crew_model.ownership import CrewRules, Ownership
from tasks.crew_model.response_progress import Responses
from tasks.crew_model.step_time import StepTime
from tasks.crew_model.work_search import WorkSearch

RULES = CrewRules(flush_interval_s=5.0, heartbeat_interval_s=5.0, claim_ttl_s=30.0)


def test_givers_are_in_the_order_in_which_they_gave():
    """A set of names has another order in each process, and a plan must be the same when it is made again."""
    engine = EngineModel.of(StepTime(((1, 0.1),)), 64, math.inf)
    slots = [SlotPlan(slot=slot, pool="crew", groups=tuple(range(slot, 40, 4))) for slot in range(4)]
    ownership = Ownership(Responses(np.full((40, 1), 9), slots), slots, RULES)
    for slot in range(5):
        account = Account("crew", 0.0, 0.0)
        member = ModelMember(f"{slot}-1", slot, engine, account, now_s=0.0, batch_max=None, weight=1.0, phase_s=0.0)
        member.work(0.0)
        ownership.claim_own(member)
    search = WorkSearch(ownership, random.Random(0), now_s=0.0, claim_ttl_s=30.0, free_only=False, ask=lambda *_: None)
    holders = {name: len(each.waiting) for name, each in ownership.members.items()}
    givers = search.seek(member)
    assert givers == [name for name in ownership.members if len(ownership.members[name].waiting) < holders[name]]
    assert len(givers) > 1
