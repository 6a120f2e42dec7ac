"""Names of an execution's nodes: names in the console, names of pods, and labels of pods.

An iteration's number is known only when its plan is made, so nodes count from the first iteration of their execution.

Flyte looks at the nodes behind a node in the alphabetical order of their ids, each time with all that follows it, and
stops when as many are at work as the execution's `max_parallelism` allows. A map whose pods wait for machines is one of
them. The ids of the path that carries a run on therefore sort before the ids of leaves: waiting maps never hold the
path back.
"""

from dataclasses import dataclass

from resources.labels import ITERATION_LABEL, POOL_LABEL, RUN_LABEL, url_label

PATH = frozenset({"plan", "collect", "train", "conclude"})
PATH_LETTER, LEAF_LETTER = "i", "z"


@dataclass(frozen=True, kw_only=True)
class NodeNames:
    """Names for the nodes of one iteration, or of the whole execution. Empty fields: not known at declaration.

    Attributes:
        label: prefix of names for people.
        run: the URL of the run.
        iteration: number of the iteration in the execution, or "all".
    """

    label: str = ""
    run: str = ""
    iteration: str = ""

    @classmethod
    def of_iteration(cls, number: int, count: int, run: str) -> "NodeNames":
        """Names for iteration `number` of `count`, from 1; 0 stands for what comes before the first iteration."""
        label = f"iteration {number} of {count}: " if number else f"before iteration 1 of {count}: "
        return cls(label=label, run=run, iteration=str(number))

    @classmethod
    def of_execution(cls, count: int, run: str) -> "NodeNames":
        """Names for the nodes that serve each of `count` iterations."""
        return cls(label=f"iterations 1 to {count}: ", run=run, iteration="all")

    def labels(self, pool: str) -> dict[str, str]:
        """The labels by which the costs of the pods of a pool can be split."""
        found = {RUN_LABEL: self.run and url_label(self.run), ITERATION_LABEL: self.iteration, POOL_LABEL: pool}
        return {label: value for label, value in found.items() if value}

    def of(self, what: str) -> dict[str, str]:
        """Arguments for `with_overrides`, such as i7-train and "iteration 7 of 20: train", or z7-rollout."""
        letter = PATH_LETTER if what in PATH else LEAF_LETTER
        prefix = f"{letter}{self.iteration}-" if self.iteration else ""
        return {"node_name": f"{prefix}{what}", "name": f"{self.label}{what.replace('-', ' ')}"}
