"""A history drawn in advance from a seed: a crew, its plan, and all faults.

The number of each kind of fault is bounded, and after `calm_at_s` there are no more faults, so that a history that does
not end shows an error of the protocol, not the effect of endless faults.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from simulation.simulated_absence import Absence, draw_absence
from simulation.simulated_weather import draw_weather, in_calm, in_outage, in_refusal
from storage.records.planning_records import SeedingRecord
from storage.records.records import JOINED_POOL, TRAIN_POOL, PlanRecord, SamplingParams, SlotPlan
from storage.stores.faults import FaultRates
from tasks.planning.division import assign_groups
from tasks.turns.scripted_environments import Script

VOCABULARY = 50
STOP_TOKEN = 0
CONTEXT = 1 << 10
PROMPT_TOKENS = 3
SLOWEST_CLOCK = 0.85
TRAINING_S_MAX = 5.0
ITERATIONS = (1,) * 7 + (2, 2, 3)
AHEAD = 0.3
STALENESS = (1, 1, 1, 2, 3)
# Only after so many iterations beyond those that run ahead may retention delete what one of these samples from.
BEYOND = 2
ADAPTS, INEXACT = 0.4, 0.4
STANDS = 0.4
TALKS = 0.3
DRAFTS = 0.25
Kind = Literal[
    "kill",
    "notice",
    "freeze",
    "suspend",
    "hang",
    "outage",
    "mass",
    "trainer kill",
    "trainer freeze",
    "denied",
    "full",
    "clock",
    "heartbeat",
]
LASTING: tuple[Kind, ...] = ("freeze", "suspend", "hang", "outage", "trainer freeze", "denied", "full")
# How often each of them strikes in a history.
REFUSALS: dict[Kind, tuple[int, ...]] = {
    "denied": (0,) * 9 + (1,),
    "full": (0,) * 9 + (1,),
    "clock": (0, 0, 0, 1, 2),
    "heartbeat": (0, 0, 0, 1, 3),
}


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault of a process that is drawn when the fault happens; `duration_s` if the fault has a duration."""

    at_s: float
    kind: Kind
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A machine's decode step: base_s up to `plateau` responses together, and proportionally more beyond."""

    base_s: float
    plateau: int

    def step_s(self, batch: int) -> float:
        return self.base_s * max(1.0, batch / self.plateau)


@dataclass(frozen=True, kw_only=True)
class History:
    """A history as drawn in advance.

    Attributes:
        arrivals_s: first start of each member's slot; members beyond the plan's slots are joiners.
        stays_s: time after which a member leaves by itself; None: never. The member on the trainer's machine leaves
            after seeding.
        objective, cut_share: settings of the plan's own crew.
        in_plan_order: whether the trainer takes groups in plan order; always if the plan limits the trained groups.
        micro_batch_tokens_max: the most padded tokens, prompts included, of a micro-batch.
        engine_dies: the probability per decode step, until the calm, that the engine dies in it.
        absence: members that do not come; None: all come, as often as needed, and the trainer's machine never
            generates.
        trainer_speed: speed of the trainer's machine when it generates without members.
        iterations: number of iterations from `plan` on. A single iteration ends when closed; of several, each is
            trained, published, concluded and swept.
        ahead: number of iterations that are planned and rolled out during training of an earlier one; `max_staleness`.
        stands: whether the crew stands, with members that work on every iteration.
        adapts: whether weight versions are published as adapters of version 0.
        inexact: whether the last bits of a training step differ between lives of the trainer, as on GPUs.
        script: behaviour of the environments that answer the policy's turns; None: a response is one turn.
        drafts: whether engines verify drafts (simulation/simulated_drafts.py).
    """

    seed: int
    plan: PlanRecord
    median_length: float
    in_flight: int
    speeds: tuple[Speed, ...]
    arrivals_s: tuple[float, ...]
    stays_s: tuple[float | None, ...]
    objective: Literal["makespan", "gpu_seconds"]
    cut_share: float | None
    strikes: tuple[Strike, ...]
    crashes: int
    weather: FaultRates
    calm_at_s: float
    cold_start_s: tuple[float, float]
    flush_interval_s: float
    heartbeat_interval_s: float
    claim_ttl_s: float
    idle_timeout_s: float
    poll_interval_s: float
    in_plan_order: bool
    micro_batch_tokens_max: int
    engine_dies: float
    absence: Absence | None
    trainer_speed: Speed
    iterations: int
    ahead: int
    stands: bool = False
    adapts: bool = False
    inexact: bool = False
    script: Script | None = None
    drafts: bool = False

    def pool(self, member: int) -> str:
        """The pool of a member."""
        return self.plan.slots[member].pool if member < len(self.plan.slots) else JOINED_POOL

    def is_crew(self, member: int) -> bool:
        """True if Flyte starts the member again after its death."""
        return self.pool(member) not in (JOINED_POOL, TRAIN_POOL)

    @property
    def last_fault_s(self) -> float:
        """The time after the last fault and the return of the last struck member."""
        struck_s = [strike.at_s + strike.duration_s for strike in self.strikes]
        calm_s = max([self.calm_at_s + self.weather.pause_s[1], *struck_s])
        return calm_s if self.absence is None else max(calm_s, self.absence.lasts_s + 4 * self.cold_start_s[1])

    @property
    def wait_s_max(self) -> float:
        """The longest time without new tokens in the journal after a fault, while a response is unfinished.

        In the worst case no member is left. The trainer's machine must notice this, free its device, start an engine,
        see that the dead members are dead, load weights, decode and flush. Before that, a member may have loaded
        weights in vain, or the trainer may have trained.
        """
        if self.absence is None:
            return math.inf
        beats_s = 3 * self.heartbeat_interval_s + 2 * self.flush_interval_s + 2 * self.poll_interval_s
        engines_s = 3 * self.cold_start_s[1]
        asleep_s = self.absence.seeding_after_s + self.claim_ttl_s + beats_s + engines_s + self.call_s_max
        return asleep_s / SLOWEST_CLOCK + self.slowest_step_s + TRAINING_S_MAX * self.plan.num_groups

    @property
    def call_s_max(self) -> float:
        """The longest time of a call of a tool; 0 if there are none."""
        return 0.0 if self.script is None else 2 * self.script.call_s

    @property
    def slowest_step_s(self) -> float:
        """The step time of the slowest machine with a full batch."""
        speeds = self.speeds if self.absence is None else (*self.speeds, self.trainer_speed)
        return max(speed.step_s(self.in_flight) for speed in speeds)

    @property
    def calm(self) -> FaultRates:
        """The store's fault rates when there are no more faults."""
        return in_calm(self.weather)

    @property
    def untroubled(self) -> "History":
        """The same history without any fault except absent members."""
        return replace(self, strikes=(), crashes=0, engine_dies=0.0, weather=self.calm)

    @property
    def outage(self) -> FaultRates:
        """The store's fault rates in an outage, when every request fails."""
        return in_outage(self.weather)

    def refusal(self, kind: Literal["denied", "full"]) -> FaultRates:
        """The store's fault rates during a refusal of all requests, or of requests that take room."""
        return in_refusal(self.weather, denied=kind == "denied")


def draw_history(seed: int, *, all_come: bool = False, iterations: int | None = None) -> History:
    """The history of a seed; the same on every machine and in every process.

    all_come: no member is absent. iterations: in place of how many are drawn.
    """
    of_run = random.Random(f"iterations {seed}")
    drawn = of_run.choice(ITERATIONS)
    number = drawn if iterations is None else iterations
    ahead = _draw_ahead(seed) if number > 1 and of_run.random() < AHEAD else 0
    if ahead > 1 and iterations is None:
        number = ahead + BEYOND
    stands = number > 1 and random.Random(f"stands {seed}").random() < STANDS
    # A trainer that is not there yet cannot generate when members do not come.
    history = _draw(seed, f"{seed}", None, all_come=all_come or bool(ahead) or stands, ahead=ahead)
    of_training = random.Random(f"training {seed}")
    adapts, inexact = of_training.random() < ADAPTS, of_training.random() < INEXACT
    drafts = random.Random(f"drafts {seed}").random() < DRAFTS
    return _standing(replace(history, iterations=number, stands=stands, adapts=adapts, inexact=inexact, drafts=drafts))


def draw_next(history: History, plan: PlanRecord) -> History:
    """What happens in a later iteration of a history, whose plan is known by then."""
    name, all_come = f"{history.seed}/{plan.iteration}", history.absence is None
    drawn = _draw(history.seed, name, plan, all_come=all_come, ahead=history.ahead)
    kept = {name: getattr(history, name) for name in ("iterations", "stands", "adapts", "inexact", "drafts")}
    return _standing(replace(drawn, **kept))


def _draw_ahead(seed: int) -> int:
    return random.Random(f"staleness {seed}").choice(STALENESS)


def _standing(history: History) -> History:
    """The history with the settings of a standing crew, if the history has one."""
    return replace(history, objective="makespan", cut_share=None) if history.stands else history


def _draw(seed: int, name: str, plan: PlanRecord | None, *, all_come: bool, ahead: int) -> History:
    """`name` is that of what is drawn; without a plan one is drawn, too."""
    rng = random.Random(f"history {name}")
    # A generator of its own, so that everything else is drawn as in a history in which all groups are wanted.
    of_filter = random.Random(f"groups wanted {name}")
    of_planning = random.Random(f"planning {name}")
    of_crew = random.Random(f"crew {name}")
    of_store = random.Random(f"store {name}")
    if plan is None:
        drawn = _draw_plan(rng)
        wanted = _draw_wanted(of_filter, drawn)
        # The prompts of an iteration that runs ahead are known only if all groups of this one are wanted.
        plan = _draw_planning(of_planning, drawn if ahead else wanted)
    cut_share = of_planning.choice((None, None, None, 0.3, 0.6))
    slots, joiners = len(plan.slots), rng.choice((0, 0, 1, 1, 2, 3))
    ttl_s = rng.uniform(12, 30)
    base_s = rng.choice((0.3, 0.6, 1.0))
    calm_at_s = rng.uniform(100, 300)
    arrivals = [rng.uniform(0, 300) if rng.random() < 0.1 else rng.uniform(0, 15) for _ in range(slots)]
    cold_start_s = rng.uniform(1, 30)
    crew = [place.slot for place in plan.slots if place.pool != TRAIN_POOL]
    absence = None if all_come else draw_absence(of_crew, crew, ttl_s, calm_at_s)
    if absence is not None:
        absence = replace(absence, attempts_max=of_store.choice((math.inf, math.inf, 3, 6)))
    history = History(
        seed=seed,
        plan=plan,
        median_length=rng.uniform(4, 16),
        in_flight=rng.choice((2, 3, 4, 8)),
        speeds=tuple(_draw_speed(rng, base_s) for _ in range(slots + joiners)),
        arrivals_s=(*arrivals, *(rng.uniform(0, 200) for _ in range(joiners))),
        stays_s=(*_seeding_s(plan), *(rng.choice((None, None, rng.uniform(20, 200))) for _ in range(joiners))),
        objective="makespan" if cut_share is None and of_planning.random() < 0.8 else "gpu_seconds",
        cut_share=cut_share,
        strikes=(
            *_draw_strikes(rng, ttl_s, calm_at_s),
            *(() if absence is None else _draw_trainers_strikes(of_crew, (0, 1, 2), calm_at_s)),
            *_draw_refusals(of_store, calm_at_s),
        ),
        crashes=rng.choice((0, 0, 1, 2, 4, 8)),
        weather=replace(draw_weather(rng, ttl_s), page_keys=of_store.choice((0, 0, 8, 30))),
        calm_at_s=calm_at_s,
        cold_start_s=(cold_start_s, 2 * cold_start_s),
        flush_interval_s=rng.uniform(2, 8),
        heartbeat_interval_s=ttl_s / rng.uniform(3, 6),
        claim_ttl_s=ttl_s,
        idle_timeout_s=rng.choice((30.0, 60.0, 120.0)),
        poll_interval_s=rng.uniform(4, 8),
        in_plan_order=rng.random() < 0.5 or plan.groups_wanted is not None,
        micro_batch_tokens_max=of_filter.choice((1, 60, 120, 300)),
        engine_dies=rng.choice((0.0, 0.0, 0.005, 0.03)),
        absence=absence,
        trainer_speed=_draw_speed(of_crew, base_s),
        iterations=1,
        ahead=ahead,
        script=_draw_script(random.Random(f"turns {name}")),
    )
    # Without other faults, nothing else ends a wrong wait, so the check finds it.
    return history.untroubled if absence is not None and of_crew.random() < 1 / 3 else history


def _draw_plan(rng: random.Random) -> PlanRecord:
    groups, slots = rng.randint(4, 10), rng.randint(2, 6)
    return PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=rng.getrandbits(32),
        num_generations=rng.randint(2, 4),
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(
            SlotPlan(slot=slot, pool="rollout", groups=members)
            for slot, members in enumerate(assign_groups(groups, slots))
        ),
        sampling=SamplingParams(max_completion_length=rng.randint(10, 50), stop_token_ids=(STOP_TOKEN,)),
        config={},
        created_at_s=0.0,
    )


def _draw_wanted(rng: random.Random, plan: PlanRecord) -> PlanRecord:
    """In a third of the plans, at most about half of the groups are wanted; fewer may have unequal rewards."""
    if rng.random() >= 1 / 3:
        return plan
    return replace(plan, groups_wanted=rng.randint(1, plan.num_groups // 2 + 1))


def _draw_planning(rng: random.Random, plan: PlanRecord) -> PlanRecord:
    """In a third of the plans the last slot is the trainer's; in a third, one or two other slots have a small batch."""
    slots = list(plan.slots)
    seeding = None
    if rng.random() < 1 / 3:
        slots[-1] = replace(slots[-1], pool=TRAIN_POOL)
        seeding = SeedingRecord(seeding_s=rng.uniform(5, 120), members=len(slots) - 1)
    if rng.random() < 1 / 3:
        for slot in rng.sample(range(len(slots) - 1), rng.randint(1, min(2, len(slots) - 1))):
            slots[slot] = replace(slots[slot], batch_max=rng.randint(1, 3))
    return replace(plan, slots=tuple(slots), seeding=seeding)


def _draw_script(rng: random.Random) -> Script | None:
    """In TALKS of the histories the policy takes turns with environments. None of them is lost for good."""
    if rng.random() >= TALKS:
        return None
    return Script(
        turns_max=rng.choice((2, 4, 6)),
        answer_tokens_max=rng.choice((1, 4)),
        call_s=rng.uniform(0.5, 10),
        effects_share=rng.choice((0.0, 0.5, 1.0)),
        can_be_rebuilt=rng.random() < 0.8,
        losses=rng.choice((0, 0, 1)),
        attempts_max=1000,
    )


def _seeding_s(plan: PlanRecord) -> list[float | None]:
    """The times after which the plan's members leave by themselves."""
    return [plan.seeding.seeding_s if plan.seeding and slot.pool == TRAIN_POOL else None for slot in plan.slots]


def reward_of(token_ids: Iterable[int]) -> float:
    """The reward of a response from its tokens: 1 for about a third, so that two in five groups have equal rewards."""
    return float(sum(int(token) for token in token_ids) % 3 == 0)


def _draw_speed(rng: random.Random, base_s: float) -> Speed:
    straggles = 10 if rng.random() < 0.12 else 1
    return Speed(base_s=straggles * base_s * rng.uniform(0.8, 1.25), plateau=rng.randint(1, 4))


def _draw_strikes(rng: random.Random, ttl_s: float, calm_at_s: float) -> list[Strike]:
    """Draw the strikes: single members, in a quarter of the histories most of the crew at once, and the trainer."""
    strikes = []
    kinds: tuple[Kind, ...] = ("kill", "kill", "notice", "freeze", "suspend", "hang")
    for _ in range(rng.choice((0, 1, 2, 4, 7))):
        kind = rng.choice(kinds)
        duration_s = rng.uniform(0.3, 5) * ttl_s if kind != "notice" else rng.uniform(1, 30)
        strikes.append(Strike(at_s=rng.uniform(0, calm_at_s), kind=kind, duration_s=duration_s))
    if rng.random() < 0.25:
        grace_s = rng.choice((0.0, 2.0, 30.0))
        strikes.append(Strike(at_s=rng.uniform(5, calm_at_s / 2), kind="mass", duration_s=grace_s))
    if rng.random() < 0.15:
        duration_s = rng.uniform(0.3, 3) * ttl_s
        strikes.append(Strike(at_s=rng.uniform(0, calm_at_s), kind="outage", duration_s=duration_s))
    return strikes + _draw_trainers_strikes(rng, (0, 0, 1, 3), calm_at_s)


def _draw_trainers_strikes(rng: random.Random, numbers: Sequence[int], calm_at_s: float) -> list[Strike]:
    strikes = []
    kinds: tuple[Kind, ...] = ("trainer kill", "trainer freeze")
    for _ in range(rng.choice(numbers)):
        kind = rng.choice(kinds)
        strikes.append(Strike(at_s=rng.uniform(0, calm_at_s), kind=kind, duration_s=rng.uniform(20, 150)))
    return strikes


def _draw_refusals(rng: random.Random, calm_at_s: float) -> list[Strike]:
    """A store that is denied or full for a while, wall clocks that are off, and heartbeats that cannot be read."""
    strikes = []
    for kind, numbers in REFUSALS.items():
        for _ in range(rng.choice(numbers)):
            duration_s = rng.uniform(5, 60) if kind in LASTING else rng.uniform(10, 100)
            strikes.append(Strike(at_s=rng.uniform(0, calm_at_s), kind=kind, duration_s=duration_s))
    return strikes
