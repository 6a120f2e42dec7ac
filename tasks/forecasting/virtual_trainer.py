"""The trainer's machines: they may generate for a while, then train on complete groups as these come, then publish.

Where nobody else lives they go on generating, or take it up again by production's rule; what was trained by then is
trained a second time from the last checkpoint. That a model is loaded takes no time here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

from tasks.forecasting.events import Events
from tasks.forecasting.responses import Responses
from tasks.forecasting.scenario import TrainerScenario
from tasks.forecasting.virtual_crew import Crew
from tasks.forecasting.virtual_ledger import Account
from tasks.forecasting.virtual_member import EngineModel, Member
from tasks.planning.config import PlanningConfig
from tasks.planning.seeding import generates_again

# So much later than it will be true is looked whether it is: sums of seconds are rounded.
_ROUNDING_S = 1e-6


class Training:
    """The training of one iteration. on_end: when the new weights are there, and the next iteration can be planned.

    Training goes on as soon as `micro_batch_responses` in complete groups are there, with all that are there
    (RLBoost, arXiv 2510.19225, section 4.1), or with fewer when no more will come. in_order: a group is there when all
    before it are. seeding_s: the machines have generated; generated_s: of this, with engines that had started; wait_s,
    train_s: waited and trained; retrain_s: of train_s, what had been trained before they generated again.
    """

    def __init__(
        self,
        events: Events,
        scenario: TrainerScenario,
        planning: PlanningConfig,
        account: Account,
        responses: Responses,
        *,
        streaming: bool,
        in_order: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._events = events
        self._scenario = scenario
        self._planning = planning
        self._account = account
        self._responses = responses
        self._streaming, self._in_order = streaming, in_order
        self._on_end = on_end
        self._complete: set[int] = set()
        self._trained = self._trained_tokens = 0
        self._engines: list[Member] = []
        self._until_member = False
        self._checks = 0
        self._phase = "before"
        self._since_s = events.now_s
        self._crew: Crew | None = None
        self._engine: EngineModel | None = None
        self.began_s = self.ended_s = events.now_s
        self.seeding_s = self.generated_s = self.wait_s = self.train_s = self.retrain_s = 0.0

    def begin(self, crew: Crew, slots: Sequence[int], engine: EngineModel, seeding_s: float | None) -> None:
        """From now on the machines are this iteration's. slots: of the plan, one for each engine that generates.

        seeding_s: how long; None: until nothing is left.
        """
        self._crew, self._engine = crew, engine
        self.began_s = self._since_s = self._events.now_s
        if not slots or crew.ended_s is not None or seeding_s == 0:
            self._phase = "waiting"
            self._go_on()
            return
        self._generate(slots)
        if seeding_s is not None:
            self._events.after(seeding_s, self._seeded)

    def group_ended(self, group: int) -> None:
        self._complete.add(group)
        if self._phase == "waiting":
            self._go_on()

    def rollout_ended(self) -> None:
        """No more groups will come."""
        if self._phase == "generating":
            self._hand_over()
        elif self._phase == "waiting":
            self._go_on()

    def members_changed(self) -> None:
        """A member of the crew has come, or one lives no more."""
        if self._phase == "waiting":
            self._watch()
        elif self._phase == "generating" and self._until_member and self._somebody_lives:
            self._hand_over()

    @property
    def _somebody_lives(self) -> bool:
        alone_from_s = None if self._crew is None else self._crew.alone_from_s
        return alone_from_s is None or alone_from_s > self._events.now_s

    def _generate(self, slots: Sequence[int]) -> None:
        """One engine per slot starts on the machines, and claims."""
        crew, engine = self._crew, self._engine
        if crew is None or engine is None:
            raise RuntimeError("the trainer's machines generate before the iteration has begun")
        self._phase = "generating"
        weight = 1 / self._scenario.engines
        self._engines = [crew.begin(slot, engine, self._account, weight) for slot in slots]
        self._events.after(self._scenario.process_s, partial(self._work, self._engines))

    def _work(self, engines: list[Member]) -> None:
        """The engines have started; the weights are on their machines."""
        if self._phase == "generating" and engines is self._engines and self._crew is not None:
            for member in engines:
                self._account.add("process", self._scenario.process_s * member.life.weight)
                self._crew.work(member)

    def _seeded(self) -> None:
        """The plan's time is over; where nobody is there to hand over to, it goes on until somebody is."""
        if self._phase != "generating":
            return
        if self._somebody_lives:
            self._hand_over()
        else:
            self._until_member = True

    def _watch(self) -> None:
        """While the machines wait: generate again if nobody else has for long enough, or see whether that comes."""
        crew, trainer = self._crew, self._scenario
        able = trainer.engines > 0 and trainer.waits and self._planning.seeding == "auto"
        if crew is None or crew.ended_s is not None or crew.alone_from_s is None or not able:
            return
        if generates_again(self._events.now_s - crew.alone_from_s, self._planning):
            self._book_wait()
            self._until_member = True
            self._generate(range(crew.slot_beyond, crew.slot_beyond + trainer.engines))
            return
        long_enough_s = crew.alone_from_s + self._planning.seeding_after_s + _ROUNDING_S
        if long_enough_s > self._events.now_s:
            self._checks += 1
            self._events.at(long_enough_s, partial(self._check, self._checks))

    def _check(self, number: int) -> None:
        """Nobody has lived for long enough, unless somebody came since: then another check is noted, or none is due."""
        if number == self._checks and self._phase == "waiting":
            self._watch()

    def _hand_over(self) -> None:
        """Leave what is left to others, and train: first again what had been trained."""
        now_s = self._events.now_s
        duration_s = now_s - self._since_s
        self.seeding_s += duration_s
        if self._engines:
            self.generated_s += max(0.0, duration_s - self._scenario.process_s)
        for member in self._engines:
            if member.state == "loading":
                self._account.add("process", duration_s * member.life.weight)
            if self._crew is not None:
                self._crew.stop(member, notice=True)
        # Engines that the plan gave nothing have idled.
        self._account.add("idle", duration_s * (1 - len(self._engines) / self._scenario.engines))
        self._since_s = now_s
        if self._trained_tokens:
            self._phase = "training"
            self._events.after(self._trained_tokens * self._scenario.train_s_per_token, self._retrained)
        else:
            self._phase = "waiting"
            self._go_on()

    def _retrained(self) -> None:
        self.retrain_s += self._events.now_s - self._since_s
        self._trained_batch(last=False)

    def _go_on(self) -> None:
        all_ended = self._responses.left == 0
        ready = self._ready()
        enough = len(ready) * self._responses.generations >= self._scenario.micro_batch_responses
        if not (all_ended or (self._streaming and self._scenario.waits and enough)):
            self._watch()
            return
        self._book_wait()
        self._phase = "training"
        tokens = sum(self._responses.group_tokens[group] for group in ready)
        self._trained += len(ready)
        self._trained_tokens += tokens
        self._complete.difference_update(ready)
        last = self._trained == len(self._responses.group_tokens)
        duration_s = tokens * self._scenario.train_s_per_token + (self._scenario.train_fixed_s if last else 0.0)
        self._events.after(duration_s, lambda: self._trained_batch(last=last))

    def _book_wait(self) -> None:
        waited_s = self._events.now_s - self._since_s
        if self._scenario.waits:
            self.wait_s += waited_s
        self._account.add("idle" if self._scenario.waits else "standing", waited_s)
        self._since_s = self._events.now_s

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
