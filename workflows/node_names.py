"""Names of an execution's nodes: those in the console, those of pods, and the labels of pods.

An iteration's number is known only when its plan is made, so nodes count from the first iteration of their execution.
"""

from dataclasses import dataclass

from resources.labels import ITERATION_LABEL, POOL_LABEL, RUN_LABEL, url_label


@dataclass(frozen=True, kw_only=True)
class NodeNames:
    """Names for the nodes of one iteration, or of all.

    prefix: of ids, after which pods are named; label: of names for people. run: the URL of the run; iteration: its
    number in the execution, or "all"; both are empty where a workflow is declared before they are known.
    """

    prefix: str = ""
    label: str = ""
    run: str = ""
    iteration: str = ""

    @classmethod
    def of_iteration(cls, number: int, count: int, run: str) -> "NodeNames":
        """Names for iteration `number` of `count`, from 1; 0 stands for what comes before the first iteration."""
        label = f"iteration {number} of {count}: " if number else f"before iteration 1 of {count}: "
        return cls(prefix=f"i{number}-", label=label, run=run, iteration=str(number))

    @classmethod
    def of_execution(cls, count: int, run: str) -> "NodeNames":
        """Names for the nodes that serve all `count` iterations."""
        return cls(prefix="all-", label=f"iterations 1 to {count}: ", run=run, iteration="all")

    def labels(self, pool: str) -> dict[str, str]:
        """The labels by which the costs of the pods of a pool can be split."""
        found = {RUN_LABEL: self.run and url_label(self.run), ITERATION_LABEL: self.iteration, POOL_LABEL: pool}
        return {label: value for label, value in found.items() if value}

    def of(self, what: str) -> dict[str, str]:
        """Arguments for `with_overrides`, such as i7-train and "iteration 7 of 20: train"."""
        return {"node_name": f"{self.prefix}{what}", "name": f"{self.label}{what.replace('-', ' ')}"}
