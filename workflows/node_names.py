"""Names of an execution's nodes: those in the console, and those of pods.

An iteration's number is known only when its plan is made, so nodes count from the first iteration of their execution.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NodeNames:
    """Names for the nodes of one iteration, or of all.

    prefix: of ids, after which pods are named; label: of names for people.
    """

    prefix: str = ""
    label: str = ""

    @classmethod
    def of_iteration(cls, number: int, count: int) -> "NodeNames":
        """Names for iteration `number` of `count`, from 1; 0 stands for what comes before the first iteration."""
        label = f"iteration {number} of {count}: " if number else f"before iteration 1 of {count}: "
        return cls(prefix=f"i{number}-", label=label)

    @classmethod
    def of_execution(cls, count: int) -> "NodeNames":
        """Names for the nodes that serve all `count` iterations."""
        return cls(prefix="all-", label=f"iterations 1 to {count}: ")

    def of(self, what: str) -> dict[str, str]:
        """Arguments for `with_overrides`, such as i7-train and "iteration 7 of 20: train"."""
        return {"node_name": f"{self.prefix}{what}", "name": f"{self.label}{what.replace('-', ' ')}"}
