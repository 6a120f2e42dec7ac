"""The inputs about the trainer's machines: the fit of the model, the speed of training, and engines for seeding."""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from storage.records.records import TRAIN_POOL
from tasks.configuration.forecast import VLLM_START_S
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.engine_estimate import train_s_per_token
from tasks.forecasting.engine_inputs import EngineFigures, device, engine_figures
from tasks.forecasting.known_facts import KnownFacts
from tasks.forecasting.scenario import PhaseScenario, TrainerScenario
from tasks.planning.trainer_memory import Machine, doubted, kept_bytes, misfit, state_in_words, trainer_memory
from tasks.sharing.admission_forecast import COPIED_BYTES_PER_S, expected_switch_s
from tasks.sharing.residents import resident_state_bytes

# Between the store and all of the trainer's machines together, and from published weights to the next plan.
LINK_GBPS, CONTROL_S = 100.0, 30.0
# Operations per parameter and token of a forward pass.
SCORING_FLOPS = 2.0


def trainer_scenario(facts: KnownFacts) -> TrainerScenario:
    """The trainer of the configuration; raises ValueError and LookupError, which name the missing or wrong field."""
    config, pool = facts.config, facts.config.pools.train
    nodes, processes = config.trainer.nnodes, config.trainer.nnodes * config.trainer.nproc_per_node
    engines, figures = _engines(facts)
    usd_per_h = pool.price_usd_per_h * nodes
    price = "configured (usd_per_hour)" if pool.usd_per_hour is not None else f"price table, {pool.machine}"
    facts.show(f"{TRAIN_POOL}: price", f"{usd_per_h:.2f} $/h of {nodes} x {pool.machine}", price)
    # One process of the trainer uses one GPU, however many its machine has.
    gpus = processes if pool.gpus else 0
    _check_memory(facts, gpus)
    per_token = _train_s_per_token(facts, gpus)
    publish_s, control_s = _between_s(facts)
    return TrainerScenario(
        engines=engines,
        usd_per_h=usd_per_h,
        gpus=float(nodes * pool.gpus),
        responses_max=figures.responses_max,
        step_s=figures.step_s,
        prefill_tokens_per_s=figures.prefill_tokens_per_s,
        process_s=_process_s(facts),
        load_s=_ready_s(facts),
        train_s_per_token=per_token,
        train_fixed_s=publish_s,
        control_s=control_s,
        waits=not facts.in_turn,
        replay_interval=_replay_interval(facts),
        micro_batch_responses=config.run.num_generations,
        phase=_phase(facts),
    )


def _engines(facts: KnownFacts) -> tuple[int, EngineFigures]:
    """The number of engines that generate on the trainer's machines, and the figures of one; 0: none."""
    reason = next(_reasons_against_engines(facts.config, facts.gpus_per_engine), "")
    if not reason:
        try:
            figures = engine_figures(facts, TRAIN_POOL, facts.config.pools.train, None)
            return facts.config.trainer.nnodes * facts.config.trainer.nproc_per_node, figures
        except (ValueError, LookupError) as error:
            reason = str(error)
    # Only seeding depends on this; the scenario refuses a configuration that needs it.
    facts.show(f"{TRAIN_POOL}: engine", "none: it does not generate", reason)
    return 0, EngineFigures(step_s=((1, 1.0),), responses_max=1, prefill_tokens_per_s=1.0)


def _reasons_against_engines(config: RunConfig, per_engine: int) -> Iterator[str]:
    """Reasons for which tasks.configuration.run_config refuses planning.seeding 'auto'."""
    processes, gpus = config.trainer.nnodes * config.trainer.nproc_per_node, config.pools.train.gpus
    placement = config.trainer.placement
    if placement != "own":
        why = "keep the trainer's state" if placement == "standing" else "are there for the train phase only"
        yield f"trainer.placement {placement!r}: its machines {why}"
    if per_engine > 1 and processes > 1:
        yield f"rollout.vllm.tensor_parallel_size {per_engine}: each of the trainer's {processes} processes has one GPU"
    if 0 < gpus < per_engine:
        yield f"rollout.vllm.tensor_parallel_size {per_engine}: pools.train.gpus is {gpus}"


def _train_s_per_token(facts: KnownFacts, gpus: int) -> float:
    forecast, pool = facts.config.forecast, facts.config.pools.train
    if facts.probe is not None and facts.probe.train_s_per_token is not None:
        found, source = facts.probe.train_s_per_token, facts.probe.source
    elif forecast.train_s_per_token is not None:
        found, source = forecast.train_s_per_token, "configured (forecast.train_s_per_token)"
    else:
        machine = device(TRAIN_POOL, pool, gpus)
        if machine is None:
            raise ValueError(
                "pools.train.gpus: value 0, and no speed of training is known; allowed: at least 1, "
                "forecast.train_s_per_token, or a run.url with a committed iteration"
            )
        operations = flops_per_parameter(facts.config)
        # The prompt is trained on with every response.
        per_generated = (forecast.prompt_tokens + facts.mean) / facts.mean
        found = train_s_per_token(facts.sized(), machine, operations) * per_generated
        source = f"estimated: {operations:g} operations per parameter and token, "
        if facts.teachers:
            # A response has one of the teachers; the configuration does not tell how often each comes.
            scoring = [train_s_per_token(teacher, machine, SCORING_FLOPS) for teacher in facts.teachers]
            found += statistics.fmean(scoring) * per_generated
            source += f"{SCORING_FLOPS:g} per parameter of {'a' if len(scoring) > 1 else 'the'} teacher, "
        source += f"{machine.gpus} x "
        source += f"{machine.accelerator.name} at {machine.mfu:.0%}"
    facts.show(f"{TRAIN_POOL}: step", f"{1 / found:.0f} generated tokens/s", source)
    return found


def _check_memory(facts: KnownFacts, gpus: int) -> None:
    """Raise ValueError, with settings that would fit, if an unmeasured trainer's state does not fit."""
    config = facts.config
    if facts.size is None or (facts.probe is not None and facts.probe.train_s_per_token is not None):
        return
    try:
        machine = device(TRAIN_POOL, config.pools.train, gpus)
    except LookupError:
        machine = None
    if machine is None:
        return
    sheet = machine.accelerator
    memory = Machine(device_bytes=sheet.memory_bytes, processes=gpus, teachers=facts.teachers)
    found = trainer_memory(config, facts.size, memory)
    refusal = misfit(config, facts.size, sheet, memory)
    if refusal is not None:
        raise ValueError(refusal)
    words = f"{found.state / 1e9:,.0f} GB of {gpus * sheet.memory_bytes / 1e9:,.0f}"
    each_words = state_in_words(found, facts.size)
    facts.show(f"{TRAIN_POOL}: memory", words, f"{each_words}, without activations, over {gpus} processes")
    tokens, layers = found.pass_tokens, "" if config.trainer.gradient_checkpointing else "out"
    words = f"{found.activations / 1e9:,.1f} GB for each process, in a pass of {tokens:,} tokens"
    source = f"estimated, with{layers} trainer.gradient_checkpointing"
    if (doubt := doubted(config, facts.size, sheet, memory)) is not None:
        source += f"; {doubt}"
    facts.show(f"{TRAIN_POOL}: activations", words, source)


def _between_s(facts: KnownFacts) -> tuple[float, float]:
    """(seconds of publishing weights, seconds of concluding and planning) between two iterations."""
    if facts.probe is not None and facts.probe.train_fixed_s is not None:
        publish_s, control_s = facts.probe.train_fixed_s, facts.probe.control_s
        facts.show("between iterations", f"{publish_s + control_s:.1f} s", facts.probe.source)
        return publish_s, control_s
    interval = _checkpoint_interval(facts)
    written = facts.weights[1 if facts.publishes_adapters else 0]
    what = "weights"
    if not facts.config.trainer.trained_by_host:
        # A host writes it beside the next rollout.
        written += _checkpoint_bytes(facts) / interval
        what += " and checkpoint" if interval == 1 else f" and a checkpoint every {interval} iterations"
    publish_s = written * 8 / 1e9 / LINK_GBPS
    source = f"estimated: {what} at {LINK_GBPS:g} Gbit/s, and {CONTROL_S:g} s to conclude and plan"
    facts.show("between iterations", f"{publish_s + CONTROL_S:.0f} s", source)
    return publish_s, CONTROL_S


def _process_s(facts: KnownFacts) -> float:
    """Seconds until the engines on the trainer's machines have weights: measured where they have generated."""
    probed = None if facts.probe is None else facts.probe.pools.get(TRAIN_POOL)
    if facts.probe is None or probed is None or probed.start_s is None:
        return VLLM_START_S
    facts.show(f"{TRAIN_POOL}: start", f"process until weights are in place {probed.start_s:.1f} s", facts.probe.source)
    return probed.start_s


def _ready_s(facts: KnownFacts) -> float:
    """Seconds until the configured trainer has its state on its devices, in each iteration."""
    placement = facts.config.trainer.placement
    if placement == "standing":
        return 0.0
    return _switch_s(facts) if placement == "shared" else _load_s(facts)


def _load_s(facts: KnownFacts) -> float:
    """Seconds in which a new process of the trainer, or a process after generating, restores its stored state."""
    if facts.in_turn:
        return 0.0
    probe = facts.probe
    # A host has hardly anything to restore.
    if probe is not None and probe.restore_s is not None and not facts.config.trainer.trained_by_host:
        load_s, source = probe.restore_s, probe.source
    elif facts.config.pools.train.gpus:
        read, what = _restored_bytes(facts)
        load_s, source = read * 8 / 1e9 / LINK_GBPS, f"estimated: {what} at {LINK_GBPS:g} Gbit/s"
    else:
        return 0.0
    facts.show(f"{TRAIN_POOL}: load", f"{load_s:.1f} s in each iteration, before training", source)
    return load_s


def state_s(facts: KnownFacts) -> float:
    """Seconds of restoring and writing the state if the trainer's process ends with the iteration; shows nothing."""
    unshown, written_s = replace(facts, shown=[]), 0.0
    if facts.in_turn:
        return 0.0
    if facts.config.pools.train.gpus:
        written_s = _checkpoint_bytes(facts) / _checkpoint_interval(facts) * 8 / 1e9 / LINK_GBPS
    return _load_s(unshown) + written_s


def _phase(facts: KnownFacts) -> PhaseScenario | None:
    """The trainer's phase: the share of groups at which the phase is due, and the machines' start; 0 on a host."""
    placement = facts.config.trainer.placement
    if placement in ("own", "standing"):
        return None
    share = facts.config.phase_start_share
    due, source = f"phase due when {share:.0%} of the groups are recorded; ", "trainer.placement"
    if placement == "shared":
        due += "waits for other runs' phases and the host's idle time are not included"
        facts.show(f"{TRAIN_POOL}: shared", due, source)
        return PhaseScenario(start_share=share, publishes_beside=True)
    due += "the machines cost nothing between phases"
    start_s = 0.0 if facts.in_turn else VLLM_START_S
    facts.show(f"{TRAIN_POOL}: pod", f"{due}; it starts in {start_s:g} s", f"{source}; the start is assumed")
    return PhaseScenario(start_share=share, start_s=start_s)


def _switch_s(facts: KnownFacts) -> float:
    """Seconds in which another run's state leaves a host's device and the run's own state returns."""
    teachers = sum(teacher.parameters for teacher in facts.teachers)
    size = resident_state_bytes(facts.config, facts.sized().parameters, teachers)
    switch_s = expected_switch_s(size)
    told = f"estimated: states of {size / 1e9:,.0f} GB, copied to and from memory at {COPIED_BYTES_PER_S / 1e9:g} GB/s"
    facts.show(f"{TRAIN_POOL}: switch", f"{switch_s:.1f} s from another run's state to this one's", told)
    return switch_s


def _replay_interval(facts: KnownFacts) -> int:
    """Iterations between two starts of the trainer without a replay; 1 on a host, which keeps the state."""
    interval = _checkpoint_interval(facts)
    if interval == 1 or facts.config.trainer.placement in ("standing", "shared"):
        return 1
    told = f"up to {interval - 1} iterations are trained again before training"
    facts.show(f"{TRAIN_POOL}: replay", told, f"trainer.checkpoint_interval {interval}")
    return interval


def _checkpoint_interval(facts: KnownFacts) -> int:
    """Versions between two stored states; "auto" counts as 1, because an automatic interval never takes longer."""
    interval = facts.config.trainer.checkpoint_interval
    return 1 if interval == "auto" else interval


def _restored_bytes(facts: KnownFacts) -> tuple[float, str]:
    """(bytes that the trainer reads in an iteration, all ranks together, the parts in words)."""
    config, checkpoints, weights = facts.config, _checkpoint_bytes(facts), facts.weights[0]
    parts = {"checkpoints": checkpoints} if checkpoints else {}
    # What is not trained comes from the run's first weights: under adapters, and as the reference.
    if config.lora is not None or config.algorithm.needs_reference:
        parts["the first weights"] = weights
    if facts.teachers:
        parts["teachers"] = sum(teacher.bytes for teacher in facts.teachers)
    return sum(parts.values()), " and ".join(f"{size / 1e9:.0f} GB of {name}" for name, size in parts.items())


def _checkpoint_bytes(facts: KnownFacts) -> float:
    """Bytes of the checkpoints of policy and critic, equally large; adapters' checkpoints are small and count as 0."""
    if facts.size is None:
        return 0.0
    config, each = facts.config, 0.0
    if config.lora is None:
        each += kept_bytes(config.optimizer)
    if config.algorithm.estimator.needs_critic:
        each += kept_bytes(config.critic.optimizer)
    return each * facts.sized().parameters


def flops_per_parameter(config: RunConfig) -> float:
    """Operations per parameter and token of an iteration's training: 2 for a forward pass, 4 for a backward one.

    Recomputed activations add 2, frozen weights (LoRA) save 2. A KL term adds a forward pass, and log-probs before
    several optimizer steps add a forward pass. A critic of the policy's size adds as much as the policy, and a forward
    pass for values. A teacher's forward pass is not here, because a teacher has a size of its own.
    """
    algorithm = config.algorithm
    trained = 6.0 + 2.0 * config.trainer.gradient_checkpointing
    steps = algorithm.num_epochs * (trained - 2.0 * (config.lora is not None))
    passes = SCORING_FLOPS * algorithm.needs_reference
    several = algorithm.num_epochs > 1 or algorithm.num_mini_batches > 1
    passes += 2.0 * (several and algorithm.old_logprobs == "trainer")
    if algorithm.estimator.needs_critic:
        passes += algorithm.num_epochs * trained + 2.0
    return steps + passes
