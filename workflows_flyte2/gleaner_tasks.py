"""The tasks of Flyte 2, one for each task of `tasks/`, in one environment. Pods find them here by their names.

The image is the one that the configuration of `flyte` names `gleaner`; a pool's own image has precedence. No call is
cached: a task finds what is done in the run's directory.
"""

import flyte

import tasks.collect
import tasks.conclude
import tasks.evaluate
import tasks.evaluations_ended
import tasks.fleet_host
import tasks.plan
import tasks.rollout
import tasks.rollout_ended
import tasks.score
import tasks.stand
import tasks.stand_trainer
import tasks.train
import tasks.train_shared
from resources.pools import ControlPoolConfig
from workflows_flyte2.carried import carried
from workflows_flyte2.member_process import carried_apart
from workflows_flyte2.pool_settings import overrides

_CONTROL = overrides("control", ControlPoolConfig(), {})
ENVIRONMENT = flyte.TaskEnvironment(
    "gleaner",
    image=flyte.Image.from_ref_name("gleaner"),
    resources=_CONTROL["resources"],
    pod_template=_CONTROL["pod_template"],
)
STANDING_IMPORTS = (*tasks.rollout.IMPORTS, "tasks.sampling.session.standing")

plan = ENVIRONMENT.task(carried(tasks.plan.plan, __name__))
collect = ENVIRONMENT.task(carried(tasks.collect.collect, __name__))
train = ENVIRONMENT.task(carried(tasks.train.train, __name__), report=True)
train_shared = ENVIRONMENT.task(carried(tasks.train_shared.train_shared, __name__))
conclude = ENVIRONMENT.task(carried(tasks.conclude.conclude, __name__), report=True)
rollout_ended = ENVIRONMENT.task(carried(tasks.rollout_ended.rollout_ended, __name__))
plan_evaluation = ENVIRONMENT.task(carried(tasks.evaluate.plan_evaluation, __name__))
evaluate = ENVIRONMENT.task(carried(tasks.evaluate.evaluate, __name__), report=True)
evaluations_ended = ENVIRONMENT.task(carried(tasks.evaluations_ended.evaluations_ended, __name__))

rollout = ENVIRONMENT.task(carried_apart(tasks.rollout.rollout, __name__, tasks.rollout.IMPORTS))
score = ENVIRONMENT.task(carried_apart(tasks.score.score, __name__, tasks.score.IMPORTS))
stand = ENVIRONMENT.task(carried_apart(tasks.stand.stand, __name__, STANDING_IMPORTS))
stand_trainer = ENVIRONMENT.task(carried_apart(tasks.stand_trainer.stand_trainer, __name__))
fleet_host = ENVIRONMENT.task(carried_apart(tasks.fleet_host.fleet_host, __name__))
