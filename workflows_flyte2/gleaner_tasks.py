"""The tasks of Flyte 2, one for each task of `tasks/`, in one environment. Pods find them here by their names.

The image is the one that the configuration of `flyte` names `gleaner`; a pool's own image has precedence. No call is
cached: a task finds what is done in the run's directory.
"""

import flyte

from resources.pools import ControlPoolConfig
from tasks import (
    collect as of_collect,
    conclude as of_conclude,
    evaluate as of_evaluate,
    evaluations_ended as of_evaluations,
    fleet_host as of_fleet,
    plan as of_plan,
    rollout as of_rollout,
    rollout_ended as of_ended,
    stand as of_stand,
    stand_trainer as of_trainer,
    train as of_train,
    train_shared as of_shared,
)
from workflows_flyte2.carried import carried
from workflows_flyte2.member_process import carried_apart
from workflows_flyte2.pool_settings import overrides

_CONTROL = overrides(ControlPoolConfig(), {})
ENVIRONMENT = flyte.TaskEnvironment(
    "gleaner",
    image=flyte.Image.from_ref_name("gleaner"),
    resources=_CONTROL["resources"],
    pod_template=_CONTROL["pod_template"],
)
STANDING_IMPORTS = (*of_rollout.IMPORTS, "tasks.sampling.session.standing")

plan = ENVIRONMENT.task(carried(of_plan.plan, __name__))
collect = ENVIRONMENT.task(carried(of_collect.collect, __name__))
train = ENVIRONMENT.task(carried(of_train.train, __name__), report=True)
train_shared = ENVIRONMENT.task(carried(of_shared.train_shared, __name__))
conclude = ENVIRONMENT.task(carried(of_conclude.conclude, __name__), report=True)
rollout_ended = ENVIRONMENT.task(carried(of_ended.rollout_ended, __name__))
plan_evaluation = ENVIRONMENT.task(carried(of_evaluate.plan_evaluation, __name__))
evaluate = ENVIRONMENT.task(carried(of_evaluate.evaluate, __name__), report=True)
evaluations_ended = ENVIRONMENT.task(carried(of_evaluations.evaluations_ended, __name__))

rollout = ENVIRONMENT.task(carried_apart(of_rollout.rollout, __name__, of_rollout.IMPORTS))
stand = ENVIRONMENT.task(carried_apart(of_stand.stand, __name__, STANDING_IMPORTS))
stand_trainer = ENVIRONMENT.task(carried_apart(of_trainer.stand_trainer, __name__))
fleet_host = ENVIRONMENT.task(carried_apart(of_fleet.fleet_host, __name__))
