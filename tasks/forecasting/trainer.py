"""The trainer's machines: they may generate for a while, then train on complete groups as these come, then publish."""

from collections.abc import Callable, Sequence
from itertools import count, takewhile

from tasks.forecasting.crew import Crew
from tasks.forecasting.events import Events
from tasks.forecasting.ledger import Account
from tasks.forecasting.member import EngineModel, Member
from tasks.forecasting.responses import Responses
from tasks.forecasting.scenario import TrainerScenario


class Training:
    """The training of one iteration. on_end: when the new weights are there, and the next iteration can be planned.

    Training goes on as soon as `micro_batch_responses` in complete groups are there, with all that are there
    (RLBoost, arXiv 2510.19225, section 4.1), or with fewer when no more will come. in_order: a group is there when all
    before it are.
    """

    def __init__(
        self,
        events: Events,
        scenario: TrainerScenario,
        account: Account,
        responses: Responses,
        *,
        streaming: bool,
        in_order: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._events = events
        self._scenario = scenario
        self._account = account
        self._responses = responses
        self._streaming, self._in_order = streaming, in_order
        self._on_end = on_end
        self._complete: set[int] = set()
        self._trained = 0
        self._engines: list[Member] = []
        self._phase = "before"
        self._since_s = events.now_s
        self._crew: Crew | None = None
        self.began_s = self.ended_s = events.now_s
        self.seeding_s = self.wait_s = self.train_s = 0.0

    def begin(self, crew: Crew, slots: Sequence[int], engine: EngineModel | None, seeding_s: float | None) -> None:
        """From now on the machines are this iteration's. slots: of the plan, one for each engine that generates.

        seeding_s: how long; None: until nothing is left.
        """
        self._crew = crew
        self.began_s = self._since_s = self._events.now_s
        self._phase = "seeding"
        if engine is None or not slots or crew.ended_s is not None or seeding_s == 0:
            self._end_seeding()
            return
        weight = 1 / self._scenario.engines
        self._engines = [crew.begin(slot, engine, self._account, weight) for slot in slots]
        self._events.after(self._scenario.process_s, self._work)
        if seeding_s is not None:
            self._events.after(seeding_s, self._end_seeding)

    def group_ended(self, group: int) -> None:
        self._complete.add(group)
        if self._phase == "waiting":
            self._go_on()

    def rollout_ended(self) -> None:
        """No more groups will come."""
        if self._phase == "seeding":
            self._end_seeding()
        elif self._phase == "waiting":
            self._go_on()

    def _work(self) -> None:
        """The engines have started; the weights are on their machines."""
        if self._phase == "seeding" and self._crew is not None:
            for member in self._engines:
                self._account.add("process", self._scenario.process_s * member.life.weight)
                self._crew.work(member)

    def _end_seeding(self) -> None:
        """Hand over what is left, and train. Engines that did nothing have stood idle."""
        if self._phase != "seeding":
            return
        now_s = self._events.now_s
        self._phase = "waiting"
        self.seeding_s = now_s - self._since_s
        for member in self._engines:
            if member.state == "loading":
                self._account.add("process", self.seeding_s * member.life.weight)
            if self._crew is not None:
                self._crew.stop(member, notice=True)
        idle = 1 - len(self._engines) / self._scenario.engines if self._scenario.engines else 1.0
        self._account.add("idle", self.seeding_s * idle)
        self._since_s = now_s
        self._go_on()

    def _go_on(self) -> None:
        now_s, all_ended = self._events.now_s, self._responses.left == 0
        ready = self._ready()
        enough = len(ready) * self._responses.generations >= self._scenario.micro_batch_responses
        if not (all_ended or (self._streaming and self._scenario.waits and enough)):
            return
        if self._scenario.waits:
            self.wait_s += now_s - self._since_s
        self._account.add("idle" if self._scenario.waits else "standing", now_s - self._since_s)
        self._since_s = now_s
        self._phase = "training"
        tokens = sum(self._responses.group_tokens[group] for group in ready)
        self._trained += len(ready)
        self._complete.difference_update(ready)
        last = self._trained == len(self._responses.group_tokens)
        duration_s = tokens * self._scenario.train_s_per_token + (self._scenario.train_fixed_s if last else 0.0)
        self._events.after(duration_s, lambda: self._trained_batch(last=last))

    def _ready(self) -> list[int]:
        """Complete groups that may be trained on now."""
        if not self._in_order:
            return sorted(self._complete)
        return list(takewhile(self._complete.__contains__, count(self._trained)))

    def _trained_batch(self, *, last: bool) -> None:
        duration_s = self._events.now_s - self._since_s
        self.train_s += duration_s
        self._account.add("train", duration_s)
        self._since_s = self._events.now_s
        self._phase = "waiting"
        if last:
            self._phase = "ended"
            self.ended_s = self._events.now_s
            self._account.add("standing", self._scenario.control_s)
            self._events.after(self._scenario.control_s, self._on_end)
        else:
            self._go_on()
