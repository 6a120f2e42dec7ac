"""The trainer's machines: generate for the seeding time, then train on groups as groups become complete, then publish.

Without a live crew member, the machines go on generating, or begin again by production's rule; the groups trained by
then are trained a second time, from the last checkpoint. Training begins with loading the model and with a replay of
the iterations after the last checkpoint. Machines of a train phase come when the phase is due, and cost nothing before
and after the phase.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

from tasks.crew_model.accounts import Account
from tasks.crew_model.crew import CrewModel
from tasks.crew_model.crew_member import EngineModel, ModelMember
from tasks.crew_model.events import Events
from tasks.crew_model.response_progress import Responses
from tasks.forecasting.scenario import PhaseScenario, Policy, TrainerScenario
from tasks.planning.seeding import generates_again

# Sums of seconds are rounded, so a condition is checked this much later than it becomes true.
_ROUNDING_S = 1e-6
_ROUNDING = 1e-9


class Training:
    """The training of one iteration.

    Training continues with all complete groups as soon as complete groups with `micro_batch_responses` responses exist
    (RLBoost, arXiv 2510.19225, section 4.1), or with fewer responses at the end of the rollout.

    Args:
        events: the events of the simulation.
        scenario: the trainer's machines.
        policy: the rules of the run.
        account: account of the trainer's machines.
        responses: progress of the iteration's responses.
        streaming: True if training begins with the first complete groups; False: after all responses.
        in_order: True if a group counts as complete only after every group with a lower number.
        on_end: called when the new weights exist and the next iteration can be planned.
        on_published: called when the new weights exist.
        replay_tokens: tokens of earlier iterations that are trained again after loading.

    Attributes:
        began_s: second at which the machines began with the iteration.
        ended_s: second of the published weights.
        seeding_s: seconds in which the machines generated.
        generated_s: part of seeding_s with started engines.
        wait_s: seconds of waiting for responses.
        train_s: seconds of training.
        retrain_s: part of train_s that repeats earlier training.
    """

    def __init__(
        self,
        events: Events,
        scenario: TrainerScenario,
        policy: Policy,
        account: Account,
        responses: Responses,
        *,
        streaming: bool,
        in_order: bool,
        on_end: Callable[[], None],
        on_published: Callable[[], None] = lambda: None,
        replay_tokens: int = 0,
    ) -> None:
        self._events = events
        self._scenario = scenario
        self._policy = policy
        self._account = account
        self._responses = responses
        self._streaming, self._in_order = streaming, in_order
        self._on_end, self._on_published = on_end, on_published
        self._replay_s = replay_tokens * scenario.train_s_per_token
        self._recorded: set[int] = set()
        self._complete: set[int] = set()
        self._trained = self._trained_tokens = 0
        self._engines: list[ModelMember] = []
        self._until_member = False
        self._checks = 0
        self._phase = "before"
        self._since_s = events.now_s
        self._crew: CrewModel | None = None
        self._engine: EngineModel | None = None
        self.began_s = self.ended_s = events.now_s
        self.seeding_s = self.generated_s = self.wait_s = self.train_s = self.retrain_s = 0.0

    @property
    def publish_s(self) -> float:
        """Seconds from the end of the last group's training to the published weights."""
        return self._scenario.train_fixed_s

    def begin(self, crew: CrewModel, slots: Sequence[int], engine: EngineModel, seeding_s: float | None) -> None:
        """Give the machines to the iteration. slots: the plan's slots on the trainer's machines, one for each engine.

        seeding_s: seconds of generating; None: until nothing is left.
        """
        self._crew, self._engine = crew, engine
        self.began_s = self._since_s = self._events.now_s
        if self._scenario.phase is not None:
            self._phase = "collecting"
            self._take_if_due(self._scenario.phase)
            return
        if not slots or crew.ended_s is not None or seeding_s == 0:
            self._load()
            return
        self._generate(slots)
        if seeding_s is not None:
            self._events.after(seeding_s, self._seeded)

    def group_ended(self, group: int) -> None:
        """Note a group whose responses have ended, so that it is recorded."""
        self._recorded.add(group)
        if self._phase == "collecting" and self._scenario.phase is not None:
            self._take_if_due(self._scenario.phase)

    def group_complete(self, group: int) -> None:
        """Note a group of which nothing is missing, and train if enough groups are complete."""
        self._complete.add(group)
        if self._phase == "waiting":
            self._go_on()

    def rollout_ended(self) -> None:
        """No more groups will come: train on the rest."""
        if self._phase == "generating":
            self._hand_over()
        elif self._phase == "waiting":
            self._go_on()

    def members_changed(self) -> None:
        """A member of the crew has begun or ended."""
        if self._phase == "waiting":
            self._watch()
        elif self._phase == "generating" and self._until_member and self._member_lives:
            self._hand_over()

    @property
    def _member_lives(self) -> bool:
        alone_from_s = None if self._crew is None else self._crew.alone_from_s
        return alone_from_s is None or alone_from_s > self._events.now_s

    def _generate(self, slots: Sequence[int]) -> None:
        """Start one engine per slot on the machines, and let it claim."""
        crew, engine = self._crew, self._engine
        if crew is None or engine is None:
            raise RuntimeError("the trainer's machines generate before the iteration has begun")
        self._phase = "generating"
        weight = 1 / self._scenario.engines
        self._engines = [crew.begin(slot, engine, self._account, weight) for slot in slots]
        self._events.after(self._scenario.process_s, partial(self._work, self._engines))

    def _work(self, engines: list[ModelMember]) -> None:
        """Let the started engines decode."""
        if self._phase == "generating" and engines is self._engines and self._crew is not None:
            for member in engines:
                self._account.add("process", self._scenario.process_s * member.life.weight)
                self._crew.work(member)

    def _seeded(self) -> None:
        """End the seeding time: hand over to the crew, or generate until a live member can take over."""
        if self._phase != "generating":
            return
        if self._member_lives:
            self._hand_over()
        else:
            self._until_member = True

    def _watch(self) -> None:
        """While waiting: generate again if no member has lived for long enough, or check again at that second."""
        crew, trainer = self._crew, self._scenario
        able = trainer.engines > 0 and trainer.waits and self._policy.planning.seeding == "auto"
        if crew is None or crew.ended_s is not None or crew.alone_from_s is None or not able:
            return
        after_s = self._policy.seeding_after_s
        if generates_again(self._events.now_s - crew.alone_from_s, after_s, self._policy.planning):
            self._book_wait()
            self._until_member = True
            self._generate(range(crew.slot_beyond, crew.slot_beyond + trainer.engines))
            return
        long_enough_s = crew.alone_from_s + after_s + _ROUNDING_S
        if long_enough_s > self._events.now_s:
            self._checks += 1
            self._events.at(long_enough_s, partial(self._check, self._checks))

    def _check(self, number: int) -> None:
        """Watch again, unless a newer check exists or the machines have stopped waiting."""
        if number == self._checks and self._phase == "waiting":
            self._watch()

    def _take_if_due(self, phase: PhaseScenario) -> None:
        """Start the process on the machines if enough groups are recorded for the phase."""
        recorded = len(self._usable(self._recorded))
        if recorded >= phase.start_share * len(self._responses.group_tokens) - _ROUNDING:
            self._phase, self._since_s = "starting", self._events.now_s
            self._events.after(phase.start_s, self._load)

    def _hand_over(self) -> None:
        """Leave unfinished responses to the crew, and train."""
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
        # Engines without a slot of the plan have idled.
        self._account.add("idle", duration_s * (1 - len(self._engines) / self._scenario.engines))
        self._since_s = now_s
        self._load()

    def _load(self) -> None:
        """Load the model and replay, then repeat the training from before the machines generated again."""
        self._phase = "loading"
        if self._scenario.load_s or self._replay_s:
            self._events.after(self._scenario.load_s + self._replay_s, self._loaded)
        else:
            self._loaded()

    def _loaded(self) -> None:
        took_s = self._events.now_s - self._since_s
        replay_s = min(took_s, self._replay_s)
        self.train_s += replay_s
        self.retrain_s += replay_s
        self._account.add("train", replay_s)
        self._account.add("process", took_s - replay_s)
        self._since_s = self._events.now_s
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
        ready = self._ready()
        streams = self._streaming and self._scenario.waits
        # Scores of groups that have ended may still be missing.
        is_rest = self._trained + len(ready) == len(self._responses.group_tokens)
        all_ended = self._responses.left == 0 and bool(ready) and (streams or is_rest)
        enough = len(ready) * self._responses.generations >= self._scenario.micro_batch_responses
        if not (all_ended or (streams and enough)):
            self._watch()
            return
        self._book_wait()
        self._phase = "training"
        tokens = sum(self._responses.group_tokens[group] for group in ready)
        self._trained += len(ready)
        self._trained_tokens += tokens
        self._complete.difference_update(ready)
        last = self._trained == len(self._responses.group_tokens)
        duration_s = tokens * self._scenario.train_s_per_token
        if last and not self._publishes_beside:
            duration_s += self._scenario.train_fixed_s
        self._events.after(duration_s, lambda: self._trained_batch(last=last))

    @property
    def _publishes_beside(self) -> bool:
        return self._scenario.phase is not None and self._scenario.phase.publishes_beside

    def _book_wait(self) -> None:
        waited_s = self._events.now_s - self._since_s
        if self._scenario.waits:
            self.wait_s += waited_s
        self._account.add("idle" if self._scenario.waits else "standing", waited_s)
        self._since_s = self._events.now_s

    def _ready(self) -> list[int]:
        """Complete groups ready for training."""
        return self._usable(self._complete)

    def _usable(self, groups: set[int]) -> list[int]:
        """The groups, of those not trained yet, whose turn it is."""
        if not self._in_order:
            return sorted(groups)
        return list(takewhile(groups.__contains__, count(self._trained)))

    def _trained_batch(self, *, last: bool) -> None:
        duration_s = self._events.now_s - self._since_s
        self.train_s += duration_s
        self._account.add("train", duration_s)
        self._since_s = self._events.now_s
        self._phase = "waiting"
        if not last:
            self._go_on()
            return
        self._phase = "ended"
        if self._publishes_beside:
            self._events.after(self._scenario.train_fixed_s, self._published)
        else:
            self._published()

    def _published(self) -> None:
        self.ended_s = self._events.now_s
        if self._scenario.phase is None:
            self._account.add("standing", self._scenario.control_s)
        self._on_published()
        self._events.after(self._scenario.control_s, self._on_end)
