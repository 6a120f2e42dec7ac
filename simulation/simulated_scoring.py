"""A crew whose responses are scored by a pool of scorers: an iteration of a history, with further faults of its own.

Members, trainer, claims and journals are as in a simulated crew. In most histories some lives of members decode other
tokens than the rest, as machines in bfloat16 do, so that it shows which tokens a score belongs to. Flyte starts lost
scorers again, sometimes beside a frozen one. If the trainer gives up waiting, the operator starts all scorers anew.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from simulation.ledger import Ledger
from simulation.ledger_of_run import LedgerOfRun
from simulation.simulated_crew import TURNS_MAX, SimulatedCrew
from simulation.simulated_history import TRAINING_S_MAX, VOCABULARY, History, draw_history
from simulation.simulated_lines import LateClaims
from simulation.simulated_machine import HangingEngine
from simulation.simulated_member import Members
from simulation.simulated_path import config_of
from simulation.simulated_scorer import SimulatedScorer, learner_without_model
from simulation.simulated_session import Machine
from simulation.simulated_trainer import REWARD, Batches
from simulation.undisturbed import prompt
from simulation.virtual_time import Timeline
from storage.records import layout, records
from storage.records.records import RunRecord
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.grading.grader import Grader
from tasks.learning.awaited_scores import AwaitedScores
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.teacher_scoring import TeacherScoring
from tasks.sampling.engines.engine import GenerationRequest

RESUMED_MAX = 6
UNSTEADY = 0.8
Fault = Literal["kill", "notice", "freeze", "suspend"]
FAULTS: tuple[Fault, ...] = ("kill", "kill", "notice", "freeze", "freeze", "suspend")


@dataclass(frozen=True)
class ScorerStrike:
    """A fault of a scorer. comes_again: whether Flyte starts another process beside a frozen one."""

    at_s: float
    scorer: int
    kind: Fault
    duration_s: float
    comes_again: bool


@dataclass(frozen=True)
class ScoringHistory:
    """A history of one iteration with scorers, as drawn in advance.

    Attributes:
        crew: What happens to members, trainer and store.
        top_k: As in the section `teacher`.
        arrivals_s: When each scorer comes first.
        strikes: Faults of scorers.
        succeeded: When a member is frozen, and for how long; Flyte starts its successor meanwhile.
        pass_s: The bounds of the seconds that a pass takes.
        shard_tokens: The most tokens whose scores one shard holds.
        late_claims: The probability that a member's claim comes late, after the member has sealed.
        unsteady: The probability that a life of a member decodes other tokens.
    """

    crew: History
    top_k: int | None
    arrivals_s: tuple[float, ...]
    strikes: tuple[ScorerStrike, ...]
    succeeded: tuple[tuple[float, float], ...]
    pass_s: tuple[float, float]
    shard_tokens: int
    late_claims: float
    unsteady: float

    @property
    def seed(self) -> int:
        """The seed from which everything was drawn."""
        return self.crew.seed

    @property
    def turns_max(self) -> int:
        """The most turns of all processes; a process that waits looks around all the time, which takes turns.

        A crew's turns, twice, are for its members; successors of frozen members stay beside them, as do scorers.
        """
        members = len(self.crew.arrivals_s)
        beside = len(self.arrivals_s) + len(self.succeeded) + sum(strike.comes_again for strike in self.strikes)
        return 2 * TURNS_MAX * (members + beside) // members

    @property
    def config(self) -> RunConfig:
        """The configuration in force."""
        crew = self.crew
        config = config_of(crew)
        teacher = TeacherConfig(path="/nowhere", top_k=self.top_k, pool="scorers")
        rollout = replace(config.rollout, flush_interval_s=crew.flush_interval_s, claim_ttl_s=crew.claim_ttl_s)
        trainer = replace(
            config.trainer, micro_batch_tokens_max=crew.micro_batch_tokens_max, group_timeout_s=20 * crew.claim_ttl_s
        )
        pools = replace(config.pools, scoring={"scorers": config.pools.train})
        return replace(config, teacher=teacher, rollout=rollout, trainer=trainer, pools=pools)


def draw_scoring_history(seed: int) -> ScoringHistory:
    """The history of a seed; the same on every machine and in every process."""
    drawn, rng = draw_history(seed, all_come=True, iterations=1), random.Random(f"scorers {seed}")
    # A teacher excludes filtering.
    crew = replace(drawn, drafts=False, plan=replace(drawn.plan, groups_wanted=None))
    scorers, ttl_s = rng.randint(1, 3), crew.claim_ttl_s
    strikes = [
        ScorerStrike(
            at_s=rng.uniform(0, crew.calm_at_s),
            scorer=rng.randrange(scorers),
            kind=rng.choice(FAULTS),
            duration_s=rng.uniform(0.3, 4) * ttl_s,
            comes_again=rng.random() < 0.5,
        )
        for _ in range(rng.choice((0, 4, 8, 16)))
    ]
    freezes = [(rng.uniform(2, 90), rng.uniform(0.5, 2) * ttl_s) for _ in range(rng.choice((0, 4, 10)))]
    return ScoringHistory(
        crew=replace(crew, crashes=crew.crashes + rng.choice((0, 2, 6))),
        top_k=rng.choice((None, 1, 3)),
        arrivals_s=tuple(rng.choice((0.0, rng.uniform(0, 60), rng.uniform(0, 400))) for _ in range(scorers)),
        strikes=tuple(strikes),
        succeeded=tuple(freezes),
        pass_s=rng.choice(((0.1, 2.0), (1.0, 15.0), (5.0, 2 * ttl_s))),
        shard_tokens=rng.choice((3, 7, 4096)),
        late_claims=rng.choice((0.0, 0.4, 0.9)),
        unsteady=0.0 if rng.random() >= UNSTEADY else rng.uniform(0.3, 0.9),
    )


class LedgerOfScorers(Ledger):
    """The ledger of the journal of scores, whose keys lie below a prefix."""

    def own(self, key: str) -> str:
        return key.removeprefix(layout.scoring(self.iteration))


class LedgersWithScorers(LedgerOfRun):
    """The ledgers of an iteration and of its scorers."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        common = self.common
        self.scorers = LedgerOfScorers(
            common.now, of=self.of, store=common.store, events=common.events, broken=common.broken
        )

    def of(self, key: str) -> Ledger:
        """The ledger to which a key belongs."""
        return self.scorers if key.startswith(layout.scoring(0)) else super().of(key)


class UnsteadyEngine(HangingEngine):
    """A HangingEngine that draws its tokens with other noise, by which the length of a response stays.

    Attributes:
        strangeness: 0: the noise of all others.
    """

    strangeness = 0

    def _token(self, request: GenerationRequest, key: int, position: int, version: int) -> int:
        return super()._token(request, key, position, version + self.strangeness)


class UnsteadyMembers(Members):
    """Members some of whose lives decode other tokens."""

    unsteady = 0.0

    def _new_engine(self, process: Machine, name: str, member: int | None) -> HangingEngine:
        history, rng = self._history, random.Random(f"unsteady {self._history.seed} {name}")
        engine = UnsteadyEngine(history, member, process.clock, self._dying(name), self._ledger, name)
        engine.strangeness = rng.getrandbits(16) if rng.random() < self.unsteady else 0
        return engine


class ScoredCrew(SimulatedCrew):
    """Members, the trainer and scorers of one iteration."""

    def __init__(
        self, scoring: ScoringHistory, timeline: Timeline, rng: random.Random, ledgers: LedgersWithScorers
    ) -> None:
        super().__init__(scoring.crew, timeline, rng, ledgers.begin, trained=lambda: None)
        self._scoring = scoring
        self._of_scorers = random.Random(f"lives of scorers {scoring.seed}")
        self._scorers: dict[int, Machine] = {}
        self._noticed: set[str] = set()
        self._resumed = 0
        now_s = lambda: self._timeline.now_s  # noqa: E731
        self.lives = UnsteadyMembers(scoring.crew, self._ledger, self._counts, now_s, self._connect_member)
        self.lives.unsteady = scoring.unsteady

    def begin(self) -> None:
        """Schedule everything that was drawn; the trainer comes by itself."""
        run = RunRecord(config={}, digest="", vocab_size=VOCABULARY, model_files={}, created_at_s=0.0)
        records.put(self._ledger.store, layout.RUN, run)
        super().begin()
        for scorer, arrival_s in enumerate(self._scoring.arrivals_s):
            self._timeline.after(arrival_s, partial(self._start_scorer, scorer))
        for strike in self._scoring.strikes:
            self._timeline.at(strike.at_s, partial(self._strike_scorer, strike))
        for at_s, duration_s in self._scoring.succeeded:
            self._timeline.at(at_s, partial(self._freeze_member, duration_s))
        config, passes = self._scoring.config, 4 * len(self.truth)
        waits_s = RESUMED_MAX * 2 * config.trainer.group_timeout_s + passes * self._scoring.pass_s[1]
        self._timeline.allow(self._limit_s + waits_s, self._scoring.turns_max)

    def _connect_member(self, process: Machine, name: str) -> ObjectStore:
        rng = random.Random(f"late claims {self.history.seed} {name}")

        def wait() -> None:
            if rng.random() < self._scoring.late_claims and self._timeline.now_s < self.history.calm_at_s:
                self._counts["late claims"] += 1
                process.sleep(rng.uniform(0.1, 2) * self.history.claim_ttl_s)

        return LateClaims(self.lines.connect(process, name), wait)

    def _freeze_member(self, duration_s: float) -> None:
        """A member that wakes up while its successor's claim is under way writes ends that are void."""
        living = [member for member in self.cast.living() if self.history.is_crew(member)]
        if not living:
            return
        member = self._of_scorers.choice(living)
        process = self.cast.members[member]
        self._counts["members frozen with a successor"] += 1
        self._ledger.tell(process.name, f"is frozen for {duration_s:.1f} s")
        process.freeze(duration_s)
        self._schedule_member(member, 0.6 * duration_s)

    # The trainer.

    def _observe(self, _process: Machine) -> None:
        """Nothing: which tokens are right depends on the members' lives."""

    def _train(self, process: Machine) -> None:
        history, config = self.history, self._scoring.config
        store, rng = self.lines.connect(process, process.name), random.Random(f"trainer {process.name}")
        while True:
            try:
                self._train_all(process, store, config, rng)
            except GroupTimeout as error:
                self._ledger.tell(process.name, str(error))
                self._resume()
            else:
                break
        store.create(layout.manifest(layout.weights(history.plan.iteration + 1)), b"trained")

    def _train_all(self, process: Machine, store: ObjectStore, config: RunConfig, rng: random.Random) -> None:
        assert config.teacher is not None
        plan, clock = self.history.plan, process.clock
        with Grader((REWARD,)) as grader:
            batches = Batches(self.history, store, process, grader, lambda _: None)
            scoring = TeacherScoring(
                store,
                plan,
                [prompt(group) for group in range(plan.num_groups)],
                batches,
                learner_without_model(),
                config.teacher,
                config.trainer,
                AwaitedScores(store, plan, batches, config.teacher, config.trainer, clock),
            )
            for batch in batches:
                scoring(batch)
                process.sleep(rng.uniform(0, TRAINING_S_MAX))

    def _resume(self) -> None:
        """The operator starts the execution again, and with it every scorer that has left."""
        self._resumed += 1
        self._counts["executions resumed for scorers"] += 1
        if self._resumed > RESUMED_MAX:
            self._ledger.breaks(f"livelock: {RESUMED_MAX} executions ended without scores")
            return
        for scorer in range(len(self._scoring.arrivals_s)):
            if scorer not in self._scorers or self._scorers[scorer].dead:
                self._start_scorer(scorer)

    # Scorers, and what Flyte does with them.

    def _start_scorer(self, scorer: int) -> None:
        name = f"{scorer:05d}-{self._of_scorers.getrandbits(64):016x}"
        self._counts["starts of scorers"] += 1
        self._scorers[scorer] = self._start(
            name, partial(self._live, scorer), lambda process, error: self._scorer_ended(scorer, process, error)
        )

    def _live(self, scorer: int, process: Machine) -> None:
        scoring, rng = self._scoring, random.Random(f"scorer {self.history.seed} {process.name}")
        session = SimulatedScorer(
            process,
            self.lines.connect(process, process.name),
            self.history.plan,
            scoring.config,
            scorer,
            notice=lambda: process.name in self._noticed,
            pass_s=lambda: process.sleep(rng.uniform(*scoring.pass_s)),
            shard_tokens=scoring.shard_tokens,
        )
        self._counts["responses scored"] += session.live(process)

    def _scorer_ended(self, scorer: int, process: Machine, error: BaseException | None) -> None:
        self._ended(process, error)
        if error is not None and self._scorers[scorer] is process and not self.is_trained:
            self._timeline.after(self._starts_after_s(), partial(self._start_unless_there, scorer))

    def _start_unless_there(self, scorer: int) -> None:
        if self._scorers[scorer].dead:
            self._start_scorer(scorer)

    def _strike_scorer(self, strike: ScorerStrike) -> None:
        process = self._scorers.get(strike.scorer)
        if process is None or process.dead:
            return
        self._counts[f"scorers: {strike.kind}"] += 1
        self._ledger.tell(process.name, f"suffers {strike.kind}, {strike.duration_s:.1f} s")
        if strike.kind == "kill":
            process.kill()
        elif strike.kind == "notice":
            self._noticed.add(process.name)
        else:
            process.freeze(strike.duration_s)
            if strike.kind == "suspend":
                process.clock.stop(strike.duration_s)
            if strike.comes_again:
                self._timeline.after(0.7 * strike.duration_s, partial(self._start_scorer, strike.scorer))


@dataclass
class ScoringOutcome:
    """The course of a history.

    Attributes:
        scoring: The history.
        ledgers: Those of its iteration and of its scorers.
        counts: Of events.
        ended_at_s: The time of the end.
        requests_to_bound: The most requests of any scorer, as a share of the bound (simulation/judge_scoring.py).
    """

    scoring: ScoringHistory
    ledgers: LedgersWithScorers
    counts: Counter[str]
    ended_at_s: float
    requests_to_bound: float = 0.0

    @property
    def broken(self) -> list[str]:
        """Every broken rule, with its kind ahead of the colon."""
        return self.ledgers.common.broken


def live_scoring(scoring: ScoringHistory) -> ScoringOutcome:
    """Run a history until no event is left."""
    rng = random.Random(f"turns {scoring.seed}")
    timeline = Timeline(rng, 0.0, TURNS_MAX)
    ledgers = LedgersWithScorers(timeline)
    crew = ScoredCrew(scoring, timeline, rng, ledgers)
    crew.begin()
    crew.train()
    if not timeline.run():
        ledgers.common.breaks(f"livelock: no end by {timeline.now_s:.0f} s and {timeline.turns} turns")
    elif not crew.is_trained:
        ledgers.common.breaks("livelock: the iteration ended without being trained")
    return ScoringOutcome(scoring, ledgers, crew.outcome().counts, timeline.now_s)
