"""Performer: carries out the actions of a state machine, with a store, an engine and a clock.

The actions of one lane run in sequence; several threads may perform several lanes side by side.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from storage.clock import Clock
from storage.journal.journal import JournalWriter
from storage.journal.noise_keys import noise_key
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.draft_totals import DraftTotals
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.stores.metered import requests_of
from storage.stores.store import ObjectStore
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.session.actions import (
    AbortResponses,
    Action,
    AskEnough,
    BeginTurns,
    Claims,
    ClaimSlot,
    DecodeResult,
    DecodeStep,
    Done,
    Event,
    Failed,
    HeartbeatState,
    HeldTurn,
    Lane,
    LoadWeights,
    LookAround,
    ProbeClaims,
    ReadAsks,
    ReadClaims,
    ReadClosed,
    ReadOwnUnit,
    RestartEngine,
    StartResponses,
    Take,
    TakeAnswers,
    WriteHeartbeat,
    WriteShard,
)
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.draft_corpus import DraftCorpus
from tasks.sampling.session.session_config import SessionConfig
from tasks.turns.environments import Environments, OpenTurn

Load = Callable[[Engine, Callable[[], None]], None]


class WaitIsUseless(Exception):  # noqa: N818 - not an error
    """There is nothing to load weights for any more."""


class Performer:
    """The store, engine and clock of one incarnation."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        incarnation: str,
        *,
        prompts: Sequence[PromptRow],
        engine: Engine,
        load: Load,
        config: SessionConfig,
        clock: Clock,
        environments: Environments | None,
        enough: Callable[[], bool] | None,
        is_useless: Callable[[], bool],
        corpus: DraftCorpus | None = None,
    ) -> None:
        """load, environments, enough, corpus: see Session. is_useless: whether it is useless to wait for weights."""
        self._plan = plan
        self._prompts = prompts
        self._engine = engine
        self._environments = environments
        self._load = load
        self._clock = clock
        self._enough = enough
        self._is_useless = is_useless
        self._corpus = corpus
        self._heartbeat = HeartbeatWriter(store, plan.iteration, incarnation, engine, config, clock)
        self._claimant = Claimant(
            store,
            plan,
            incarnation=incarnation,
            slot=config.slot,
            claim_ttl_s=config.claim_ttl_s,
            clock=clock,
            parallel_reads=config.parallel_reads,
        )
        self._writer = JournalWriter(store, plan.iteration, incarnation, plan.weight_version)
        self._claims_told: tuple[int, int] | None = None
        self._performs = {
            Lane.DECODE: self._engine_action,
            Lane.FLUSH: self._write,
            Lane.CLAIM: self._claim,
        }

    def perform(self, lane: Lane, action: Action) -> Event:
        """Perform an action other than Rest and Wake; returns what came of it."""
        try:
            result = self._performs[lane](action)
        except Exception as error:  # noqa: BLE001 - the state machine decides what follows from any error
            return Failed(
                lane=lane,
                now_s=self._clock.monotonic(),
                wall_s=self._clock.wall(),
                error=error,
                claims=self._news(lane),
            )
        return Done(
            lane=lane, now_s=self._clock.monotonic(), wall_s=self._clock.wall(), result=result, claims=self._news(lane)
        )

    def _engine_action(self, action: Action) -> Any:
        match action:
            case LoadWeights():
                return self._loaded()
            case RestartEngine():
                return self._engine.restart()
            case StartResponses(responses):
                return self._engine.start([self._request(*response) for response in responses])
            case DecodeStep():
                if self._corpus is not None:
                    self._corpus.feed(self._engine)
                began_s = self._clock.monotonic()
                deltas = self._engine.step()
                return DecodeResult(deltas, self._clock.monotonic() - began_s)
            case AbortResponses(responses, engine_lives):
                if self._environments is not None:
                    self._environments.forget(responses)
                return self._engine.abort(responses) if engine_lives else None
            case _:
                return self._environment_action(action)

    def _environment_action(self, action: Action) -> Any:
        environments = self._environments
        match action:
            case BeginTurns(turns) if environments is not None:
                opened = [(self._open_turn(turn), turn.journalled) for turn in turns]
                effects = {turn.response for turn, _ in opened if environments.waits_for_journal(turn)}
                environments.begin([turn for turn, journalled in opened if journalled or turn.response not in effects])
                return effects
            case TakeAnswers(wait_s) if environments is not None:
                return environments.answers(wait_s)
            case _:
                return self._write(action)

    def _claim(self, action: Action) -> Any:
        result = self._claim_action(action)
        if self._corpus is not None:
            self._corpus.extend(self._claimant.finished_siblings.new())
        return result

    def _claim_action(self, action: Action) -> Any:
        claimant = self._claimant
        result: Any = None
        match action:
            case ReadClosed():
                result = claimant.closed()
            case ClaimSlot():
                result = claimant.take_own_slot()
            case ProbeClaims(responses):
                result = claimant.probe(responses)
            case ReadClaims():
                claimant.refresh()
            case ReadOwnUnit(claim_epochs, cuts, has_cut):
                result = claimant.own_unit_ended(claim_epochs, cuts=cuts, has_cut=has_cut)
            case LookAround(claim_epochs, held, released):
                result = claimant.look(claim_epochs, held=held, released=released)
            case Take(transfer):
                result = claimant.take(transfer)
            case ReadAsks():
                result = claimant.asked_for()
            case AskEnough():
                result = self._enough is None or self._enough()
            case _:
                result = self._write(action)
        return result

    def _write(self, action: Action) -> Any:
        """The actions of any lane."""
        match action:
            case WriteShard(pending):
                return self._writer.write(pending)
            case WriteHeartbeat(heartbeat_state):
                return self._heartbeat.beat(heartbeat_state)
            case _:
                raise TypeError(f"no action of this lane: {action}")

    def _news(self, lane: Lane) -> Claims | None:
        """The claims as read so far, if the claim lane has read any since it was last asked."""
        if lane is not Lane.CLAIM:
            return None
        told = (self._claimant.version, self._claimant.tokens_recovered)
        if told == self._claims_told:
            return None
        self._claims_told = told
        return Claims(self._claimant.owned(), self._claimant.claims_made(), self._claimant.tokens_recovered)

    def _loaded(self) -> bool:
        if self._engine.weight_version == self._plan.weight_version:
            return True
        try:
            self._load(self._engine, self._heed)
        except WaitIsUseless:
            return False
        return True

    def _heed(self) -> None:
        if self._is_useless():
            raise WaitIsUseless

    def _open_turn(self, turn: HeldTurn) -> OpenTurn:
        """A turn with what an environment must know of the plan."""
        plan = self._plan
        group = turn.response // plan.num_generations
        return OpenTurn(
            run_seed=plan.run_seed,
            iteration=plan.counted,
            group=group,
            response=turn.response,
            epoch=turn.epoch,
            prompt=self._prompts[group],
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            events=turn.events,
            turn_start=turn.turn_start,
            # Prompts are so short that the context has room for the longest completion (tasks/prompts/tokenise.py).
            room=plan.sampling.max_completion_length - len(turn.token_ids),
            unknown=turn.unknown,
            restarts=turn.restarts,
            tools=plan.tools,
        )

    def _request(self, response: int, token_ids: tuple[int, ...]) -> GenerationRequest:
        group = response // self._plan.num_generations
        return GenerationRequest(
            response,
            group,
            self._prompts[group].token_ids,
            token_ids,
            noise_key(self._plan.run_seed, self._plan.counted, response),
            self._plan.sampling,
        )


class HeartbeatWriter:
    """An incarnation's report about itself, which overwrites one object at an interval.

    A heartbeat tells the crew that the incarnation lives, how much it holds and how fast it decodes, with the counts of
    requests if `store` is metered. The heartbeat is a hint: no token counts because of a heartbeat.
    """

    def __init__(
        self, store: ObjectStore, iteration: int, incarnation: str, engine: Engine, config: SessionConfig, clock: Clock
    ) -> None:
        self._store = store
        self._key = layout.alive(iteration, incarnation)
        self._incarnation = incarnation
        self._engine = engine
        self._config = config
        self._clock = clock
        self._started_at_s = clock.wall() if config.started_at_s is None else config.started_at_s
        self._prefill_before = engine.prefill_tokens
        self._drafts_before = engine.draft_totals or DraftTotals()
        self._beats = 0
        # At each heartbeat: when, tokens until then, and seconds of all running responses until then.
        self._decoded: deque[tuple[float, int, float]] = deque()
        self._running = 0

    def beat(self, heartbeat_state: HeartbeatState) -> None:
        """Overwrite the heartbeat."""
        self._beats += 1
        requests = requests_of(self._store) - self._config.requests_before
        drafts = self._engine.draft_totals
        record = HeartbeatRecord(
            incarnation=self._incarnation,
            slot=self._config.slot,
            beat=self._beats,
            pool=self._config.pool,
            host=self._config.host,
            pid=self._config.pid,
            started_at_s=self._started_at_s,
            updated_at_s=self._clock.wall(),
            prefill_tokens=self._engine.prefill_tokens - self._prefill_before,
            engine=self._engine.name,
            batch_invariant=self._engine.batch_invariant,
            tokens_per_s=self._tokens_per_s(heartbeat_state),
            usd_per_hour=self._config.usd_per_hour,
            puts=requests.puts,
            gets=requests.gets,
            bytes_read=requests.bytes_read,
            drafts=None if drafts is None else drafts.since(self._drafts_before),
            **asdict(heartbeat_state),
        )
        records.put(self._store, self._key, record)

    def _tokens_per_s(self, heartbeat_state: HeartbeatState) -> float | None:
        """The running responses' decode rate, from a response's mean rate over the last `claim_ttl_s`.

        None until the engine has decoded for half of that without a pause: over a shorter time, a long prefill would
        look as if the member had stopped. Tokens are divided by the responses of their time: tokens of a batch that has
        shrunk are not the pace of the few responses that are left.
        """
        if not heartbeat_state.running:
            self._decoded.clear()
            return None
        now_s, ttl_s = self._clock.monotonic(), self._config.claim_ttl_s
        last_s, _, spent_s = self._decoded[-1] if self._decoded else (now_s, 0, 0.0)
        spent_s += (now_s - last_s) * (self._running + heartbeat_state.running) / 2
        self._running = heartbeat_state.running
        while self._decoded and now_s - self._decoded[0][0] > ttl_s:
            self._decoded.popleft()
        self._decoded.append((now_s, heartbeat_state.tokens_generated, spent_s))
        first_s, before, spent_before_s = self._decoded[0]
        if now_s - first_s < ttl_s / 2:
            return None
        return (heartbeat_state.tokens_generated - before) / (spent_s - spent_before_s) * heartbeat_state.running
