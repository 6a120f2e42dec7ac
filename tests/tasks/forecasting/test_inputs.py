import json
from pathlib import Path
from typing import Any

import pytest

from resources.spot_trace import AWS_P3
from tasks.configuration.forecast import VLLM_START_S
from tasks.configuration.run_config import RunConfig, parse
from tasks.forecasting.inputs import ForecastInputs, gather
from tasks.forecasting.probe import NoProbe, PoolProbe, Probe
from tasks.forecasting.scenario import AvailabilityScenario, PoolScenario
from tests.forecast_documents import document

UNPROBED = NoProbe(reason="not asked")


def config(**sections: Any) -> RunConfig:
    return parse(document(**sections))


def probe(**changes: Any) -> Probe:
    pool = PoolProbe(step_s=((1, 0.03), (8, 0.05)), start_s=45.0, losses=6, machine_h=4.0)
    return Probe(
        **{
            "run_url": "runs/a",
            "first": 0,
            "last": 2,
            "pools": {"rollout": pool, "train": pool},
            "lengths": ((0.0, 10.0), (0.5, 200.0), (1.0, 900.0)),
            "train_s_per_token": 0.002,
            "train_fixed_s": 4.0,
            "restore_s": None,
            "control_s": 3.0,
            "in_turn": False,
            **changes,
        }
    )


def only_pool(inputs: ForecastInputs) -> PoolScenario:
    """The crew's one pool, as configured."""
    [pool] = inputs.pools
    return pool.configured


def sources(inputs: ForecastInputs) -> dict[str, str]:
    return {each.name: each.source for each in inputs.shown}


def test_without_a_probe_everything_says_that_it_is_configured_or_estimated():
    inputs = gather(config(), UNPROBED)
    found = sources(inputs)
    assert found["probe"] == "not asked"
    assert not any("measured in" in source for source in found.values())
    assert found["rollout: engine"].startswith("estimated: 1 x L4 (NVIDIA L4 data sheet")
    assert found["train: engine"].startswith("estimated: 1 x L4")
    assert found["response lengths"].startswith("configured")
    assert found["rollout: losses"].startswith("another kind of machine's: ")


def test_what_was_measured_wins_over_what_is_configured():
    section = {"step_s": {1: 1.0}, "train_s_per_token": 1.0, "response_median": 5}
    inputs = gather(config(forecast=section), probe())
    pool = only_pool(inputs)
    assert pool.step_s == inputs.trainer.step_s == ((1, 0.03), (8, 0.05))
    assert inputs.trainer.train_s_per_token == 0.002
    assert (inputs.trainer.train_fixed_s, inputs.trainer.control_s) == (4.0, 3.0)
    assert inputs.work.lengths.quantiles == ((0.0, 10.0), (0.5, 200.0), (1.0, 900.0))
    # Six losses in four hours are 1.5 an hour; what is paid for until weights arrive is the process and their pull.
    assert pool.availability is not None
    assert pool.availability.rate_factor * AWS_P3.losses_per_node_h == pytest.approx(1.5)
    # From the start of the process to weights in place, which were pulled meanwhile.
    assert pool.process_s == 45.0
    found = sources(inputs)
    measured = [name for name, source in found.items() if source == "measured in runs/a, iterations 0 to 2"]
    assert {"rollout: engine", "train: engine", "train: step", "response lengths", "rollout: losses"} <= {*measured}


def test_few_losses_are_no_rate():
    seldom = {"rollout": PoolProbe(step_s=((1, 0.03),), start_s=None, losses=2, machine_h=1.0)}
    pool = only_pool(gather(config(), probe(pools=seldom)))
    assert pool.availability is not None
    assert pool.availability.rate_factor == 1.0
    assert pool.process_s == VLLM_START_S


def test_what_is_configured_wins_over_data_sheets():
    section = {"step_s": {64: 0.02, 1: 0.01}, "train_s_per_token": 1e-4}
    inputs = gather(config(forecast=section), UNPROBED)
    assert only_pool(inputs).step_s == ((1, 0.01), (64, 0.02))
    assert inputs.trainer.train_s_per_token == 1e-4
    assert sources(inputs)["train: step"] == "configured (forecast.train_s_per_token)"


def test_a_cpu_needs_a_probe_or_figures():
    pools = {"rollout": {"gpus": 0, "usd_per_hour": 1.0}, "train": {"gpus": 0, "usd_per_hour": 1.0}}
    assert only_pool(gather(config(pools=pools), probe())).prefill_tokens_per_s == pytest.approx(8 / 0.05)
    with pytest.raises(ValueError, match=r"pools\.rollout\.gpus: value 0, and no step time is known; allowed: at l"):
        gather(config(pools=pools), UNPROBED)
    with pytest.raises(ValueError, match=r"pools\.train\.gpus: value 0, and no speed of training is known; allowed"):
        gather(config(pools=pools, forecast={"step_s": {1: 0.1}}), UNPROBED)


def test_an_unknown_model_or_accelerator_is_named():
    with pytest.raises(ValueError, match=r"forecast\.parameters_billions: missing; allowed: the model's size"):
        gather(config(forecast={"parameters_billions": None}), UNPROBED)
    with pytest.raises(LookupError, match=r"pools\.rollout: accelerator: value 'abacus'; allowed: H100"):
        gather(config(pools={**document()["pools"], "rollout": {"gpus": 1, "accelerator": "abacus"}}), UNPROBED)


def test_the_model_is_counted_where_its_config_is(tmp_path: Path):
    model = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    inputs = gather(config(policy={"path": str(tmp_path)}, forecast={"parameters_billions": None}), UNPROBED)
    assert sources(inputs)["model"] == f"counted from {tmp_path}/config.json"
    assert inputs.policy.weights_bytes == 2 * (64_000 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"policy\.path: .*config\.json is not JSON"):
        gather(config(policy={"path": str(tmp_path)}, forecast={"parameters_billions": None}), UNPROBED)


def test_a_trainer_that_cannot_hold_an_engine_does_not_generate():
    large = {"parameters_billions": 12.0, "kv_bytes_per_token": 300_000.0}
    pools = {
        "rollout": {"gpus": 1, "usd_per_hour": 3.0, "accelerator": "h200"},
        "train": {"machine": "g6.xlarge", "gpus": 8, "accelerator": "l40s"},
    }
    given = {"trainer": {"nproc_per_node": 8}, "planning": {"seeding": "off"}}
    vllm = {"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}
    inputs = gather(config(forecast=large, pools=pools, rollout=vllm, **given), UNPROBED)
    assert inputs.trainer.engines == 0
    assert "do not fit" in sources(inputs)["train: engine"]


def test_an_accelerator_without_a_data_sheet_does_where_nothing_is_estimated_from_it():
    strange = {"machine": "g6.xlarge", "gpus": 1, "accelerator": "nvidia-b300"}
    pools = {"rollout": strange, "train": strange}
    inputs = gather(config(pools=pools), probe())
    assert only_pool(inputs).step_s == inputs.trainer.step_s == ((1, 0.03), (8, 0.05))
    configured = {"step_s": {1: 0.01, 8: 0.02}, "train_s_per_token": 1e-4}
    unseeded = config(pools=pools, forecast=configured, planning={"seeding": "off"})
    pool = only_pool(gather(unseeded, UNPROBED))
    assert pool.prefill_tokens_per_s == pytest.approx(8 / 0.02)
    with pytest.raises(
        LookupError, match=r"pools\.rollout: accelerator: value 'nvidia-b300'; .*for a forecast name the most similar"
    ):
        gather(config(pools=pools), UNPROBED)


def parallel(gpus: int, per_engine: int, engine: str = "vllm", **sections: Any) -> RunConfig:
    """Slots of so many GPUs with engines of per_engine, and no seeding."""
    rollout = {"engine": engine, "vllm": {"tensor_parallel_size": per_engine}}
    pools = {"rollout": {"machine": "p5.48xlarge", "gpus": gpus}, **sections.pop("pools", {})}
    return config(pools=pools, rollout=rollout, **{"planning": {"seeding": "off"}, **sections})


def test_an_engine_has_the_gpus_of_tensor_parallelism_and_not_all_of_its_machine():
    def step_s(gpus: int, per_engine: int, engine: str = "vllm") -> float:
        return only_pool(gather(parallel(gpus, per_engine, engine), UNPROBED)).step_s[0][1]

    assert step_s(8, 1) == step_s(1, 1) == step_s(8, 8, "torch")
    assert step_s(8, 4) == step_s(4, 4)
    assert step_s(1, 1) / 4 < step_s(4, 4)


def test_gpus_that_no_engine_uses_are_shown_and_left_out_of_what_is_compared():
    inputs = gather(parallel(8, 4), UNPROBED)
    [pool] = inputs.pools
    shown = next(each.value for each in inputs.shown if each.name == "rollout: GPUs")
    assert shown == "4 of a slot's 8 GPUs are paid for and unused; other setups have 4"
    assert (pool.configured.gpus, pool.trimmed.gpus) == (8, 4)
    assert pool.trimmed.usd_per_h == pytest.approx(pool.configured.usd_per_h / 2)
    assert pool.trim == {"pools.rollout.gpus": 4}
    [used] = gather(parallel(4, 4), UNPROBED).pools
    assert used.trimmed == used.configured
    assert not used.trim


def test_a_trainer_computes_on_one_gpu_per_process():
    pools = {"train": {"gpus": 8, "usd_per_hour": 1.0}}
    one, four = (
        gather(config(pools=pools, trainer={"nproc_per_node": processes}), UNPROBED).trainer for processes in (1, 4)
    )
    assert one.train_s_per_token == pytest.approx(4 * four.train_s_per_token)
    assert (one.engines, four.engines) == (1, 4)


def test_engines_of_several_gpus_do_not_multiply_the_trainers():
    """Four processes with four GPUs are no four engines of four; the configuration refuses to seed with them."""
    train = {"train": {"machine": "p5.48xlarge", "gpus": 8}}
    several = gather(parallel(4, 4, pools=train, trainer={"nproc_per_node": 4}), UNPROBED)
    assert several.trainer.engines == 0
    reason = sources(several)["train: engine"]
    assert reason == "rollout.vllm.tensor_parallel_size 4: each of the trainer's 4 processes has one GPU"
    alone = gather(parallel(4, 4, pools=train), UNPROBED)
    assert alone.trainer.engines == 1
    assert sources(alone)["train: engine"].startswith("estimated: 4 x H100-80GB")
    small = gather(parallel(4, 4), UNPROBED)
    assert small.trainer.engines == 0
    assert sources(small)["train: engine"].endswith("pools.train.gpus is 1")


def test_a_trainer_that_cannot_hold_its_state_is_refused_with_what_would_fit():
    large = {"parameters_billions": 72.7, "kv_bytes_per_token": 327_680}
    pools = {"train": {"machine": "p5.48xlarge", "gpus": 8}}

    def gathered(**sections: Any) -> ForecastInputs:
        return gather(parallel(4, 4, forecast=large, pools=pools, **sections), UNPROBED)

    with pytest.raises(
        ValueError,
        match=r"trainer\.nproc_per_node: 8 processes on H100-80GB would hold 1,163 GB of 640, 16 bytes per parameter; "
        r"allowed: at least 17 processes .*, or the section lora with at least 5, for 297 GB",
    ):
        gathered(trainer={"nproc_per_node": 8})
    assert gathered(trainer={"nproc_per_node": 8, "nnodes": 3}).trainer.gpus == 24
    adapted = gathered(trainer={"nproc_per_node": 8}, lora={"rank": 8})
    assert next(each.value for each in adapted.shown if each.name == "train: memory") == "292 GB of 640"
    # What has run fits.
    measured = parallel(4, 4, forecast=large, pools=pools, trainer={"nproc_per_node": 8})
    assert gather(measured, probe()).trainer.gpus == 8


def test_a_trainer_reads_its_checkpoint_before_it_trains():
    whole, adapters = (gather(config(**sections), UNPROBED).trainer.load_s for sections in ({}, {"lora": {"rank": 8}}))
    assert whole == pytest.approx(12 * 1.2e9 * 8 / 100e9)
    assert adapters == pytest.approx(2 * 1.2e9 * 8 / 100e9)
    assert gather(config(), probe(in_turn=True)).trainer.load_s == 0


def test_each_pool_has_its_own_losses_and_data_sheet():
    far = {"machine": "p5.48xlarge", "gpus": 1, "count": 3, "trace_path": "far.csv"}
    near = {"machine": "g6.xlarge", "gpus": 1, "count": 3, "accelerator": "a100-80g"}
    pools = {"more_rollout": {"far": far, "near": near}}
    first, other, near = (pool.configured for pool in gather(config(pools=pools), UNPROBED).pools)
    assert {pool.link_gbps for pool in (first, other, near)} == {10.0}
    assert (first.start_s, other.start_s, near.start_s) == (180.0, 180.0, 180.0)
    assert other.availability == AvailabilityScenario(path="far.csv")
    assert first.availability == near.availability == AvailabilityScenario(process="aws-p3")
    assert near.step_s < first.step_s
    odd = {"far": {**far, "accelerator": "abacus"}}
    message = r"pools\.more_rollout\.far: accelerator: value 'abacus'; .*; for a forecast name the most similar of them"
    with pytest.raises(LookupError, match=message):
        gather(config(pools={"more_rollout": odd}), UNPROBED)


def test_lengths_come_from_a_file(tmp_path: Path):
    (tmp_path / "lengths.csv").write_text("response_tokens\n" + "7\n" * 9)
    section = {"lengths_path": str(tmp_path / "lengths.csv")}
    inputs = gather(config(forecast=section), UNPROBED)
    assert sources(inputs)["response lengths"] == "configured (forecast.lengths_path)"
    assert next(each.value for each in inputs.shown if each.name == "mean response") == "7 tokens"


def test_memory_for_caches_is_what_vllm_is_told():
    def responses(**vllm: Any) -> int:
        rollout = {"max_responses_in_flight": 100_000, "vllm": vllm}
        return only_pool(gather(config(rollout=rollout), UNPROBED)).responses_max

    assert responses(gpu_memory_utilization=0.5) < responses() / 1.5
    assert responses(kv_cache_memory_bytes=1 << 30) < responses(kv_cache_memory_bytes=2 << 30) < responses()
    with pytest.raises(ValueError, match=r"pools\.rollout: 1 x L4 of an engine: 2 GB of weights .* in 10% of 24 GB"):
        responses(gpu_memory_utilization=0.1)


def test_requests_cost_what_the_price_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"requests": {"put_usd": 0.25, "get_usd": 0.125}}))
    monkeypatch.setenv("GLEANER_PRICES", str(prices))
    policy = gather(config(run={"url": "s3://bucket/run"}), UNPROBED).policy
    assert (policy.put_usd, policy.get_usd) == (0.25, 0.125)


def test_requests_to_a_local_directory_cost_nothing():
    policy = gather(config(run={"url": "runs/a"}), UNPROBED).policy
    assert (policy.put_usd, policy.get_usd) == (0.0, 0.0)


def test_one_machine_that_runs_all_in_turn_is_not_started_and_does_not_wait():
    inputs = gather(config(), probe(in_turn=True))
    assert (only_pool(inputs).start_s, inputs.trainer.waits) == (0.0, False)
    assert next(each.value for each in inputs.shown if each.name == "rollout: start").startswith("no machine, ")
    inputs = gather(config(), probe())
    assert (only_pool(inputs).start_s, inputs.trainer.waits) == (config().forecast.start_s, True)


def test_of_adapters_no_checkpoint_of_the_whole_model_is_written():
    whole, adapters = (
        gather(config(**sections), UNPROBED).trainer.train_fixed_s for sections in ({}, {"lora": {"rank": 8}})
    )
    assert whole - adapters == pytest.approx(12 * 1.2e9 * 8 / 100e9)


def test_a_checkpoint_now_and_then_costs_fewer_bytes_and_a_replay_but_not_on_a_host_that_keeps_the_state():
    def trainer(**fields):
        return gather(config(trainer=fields, planning={"seeding": "off"}), UNPROBED).trainer

    each, fifth = trainer(), trainer(checkpoint_interval=5)
    assert each.train_fixed_s - fifth.train_fixed_s == pytest.approx(12 * 1.2e9 * 8 / 100e9 * 4 / 5)
    assert (each.replay_interval, fifth.replay_interval) == (1, 5)
    assert fifth.load_s == each.load_s
    shared = trainer(checkpoint_interval=5, placement="shared", fleet="s3://bucket/fleet")
    # It writes the state beside the next rollout.
    assert each.train_fixed_s - shared.train_fixed_s == pytest.approx(12 * 1.2e9 * 8 / 100e9)
    assert shared.replay_interval == 1
    assert trainer(checkpoint_interval="auto") == each


def test_the_planner_is_told_how_the_trainer_takes_groups():
    found = gather(config(algorithm={"micro_batch_order": "plan"}), UNPROBED).policy
    assert (found.streaming, found.in_order, found.keep_order) == (True, True, False)
    assert gather(config(algorithm={"num_mini_batches": 2}), UNPROBED).policy.streaming is False
    filtering = {"filter_groups": True, "filter_groups_budget": 2.0}
    found = gather(config(algorithm=filtering), UNPROBED).policy
    assert (found.in_order, found.keep_order) == (True, True)
    assert gather(config(algorithm={"micro_batch_order": "arrival"}), UNPROBED).policy.in_order is False


@pytest.mark.parametrize(
    ("engine", "invariant", "said"),
    [("vllm", "auto", False), ("vllm", True, True), ("vllm", False, False), ("torch", True, False)],
)
def test_batch_invariant_kernels_are_named_as_a_cost_that_is_not_in_the_figures(engine, invariant, said):
    rollout = {"engine": engine, "vllm": {"batch_invariant": invariant}}
    shown = {each.name: each.value for each in gather(config(rollout=rollout), UNPROBED).shown}
    assert ("batch-invariant kernels" in shown) == said
    said_so = shown.get("batch-invariant kernels", "not in these figures, 85 s")
    assert "not in these figures" in said_so
    assert "85 s" in said_so


@pytest.mark.parametrize(
    ("engine", "cache_dir", "said"), [("vllm", None, True), ("vllm", "/cache", False), ("torch", None, False)]
)
def test_a_start_with_empty_caches_is_named_where_they_die_with_the_pod(engine, cache_dir, said):
    rollout = {"engine": engine, "vllm": {"batch_invariant": False, "cache_dir": cache_dir}}
    inputs = gather(config(rollout=rollout), UNPROBED)
    shown = {each.name: each.value for each in inputs.shown}
    assert ("caches of compiled code" in shown) == said
    assert "74 s" in shown.get("caches of compiled code", "74 s")
    assert {pool.configured.process_s for pool in inputs.pools} == {VLLM_START_S}


def test_the_start_of_the_trainers_engines_is_measured_where_they_have_generated():
    assert gather(config(), UNPROBED).trainer.process_s == VLLM_START_S
    measured = gather(config(), probe())
    assert measured.trainer.process_s == 45.0
    assert sources(measured)["train: start"].startswith("measured in runs/a")


CHECKPOINT_GB, WEIGHTS_GB = 12 * 1.2, 2 * 1.2


@pytest.mark.parametrize(
    ("sections", "read_gb"),
    [
        ({}, CHECKPOINT_GB),
        ({"algorithm": {"advantage_estimator": "gae"}}, 2 * CHECKPOINT_GB),
        ({"algorithm": {"kl_coef": 0.01}}, CHECKPOINT_GB + WEIGHTS_GB),
        ({"lora": {"rank": 8}}, WEIGHTS_GB),
    ],
)
def test_restoring_reads_every_checkpoint_and_the_first_weights_where_they_are_needed(sections, read_gb):
    pools = {**document()["pools"], "train": {"machine": "p5.48xlarge", "gpus": 1}}
    inputs = gather(config(pools=pools, **sections), UNPROBED)
    assert inputs.trainer.load_s == pytest.approx(read_gb * 8 / 100)
    assert sources(inputs)["train: load"].endswith("at 100 Gbit/s")


def test_restoring_takes_what_was_measured():
    inputs = gather(config(), probe(restore_s=21.5))
    assert inputs.trainer.load_s == 21.5
    assert sources(inputs)["train: load"].startswith("measured in runs/a")
    assert gather(config(), probe(restore_s=21.5, in_turn=True)).trainer.load_s == 0
