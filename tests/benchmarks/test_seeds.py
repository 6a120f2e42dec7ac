import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.seeds import __main__ as seeds
from benchmarks.seeds import outage, rlboost, rlboost_sensitivity, rlhfless, streamrl, together, tools, wide
from benchmarks.seeds.arms import (
    SCENARIOS,
    Arm,
    Preemption,
    colocated,
    run,
    run_all,
    scenario,
    with_counts,
    with_policy,
    with_pool,
    with_work,
)
from benchmarks.seeds.findings import Finding, summary
from benchmarks.seeds.global_cut import crew_gpu_s
from resources.accelerators import accelerator
from resources.model_size import ModelSize
from storage.records.records import TRAIN_POOL
from tasks.forecasting.engine_estimate import STEP_S, Device, decode_step_s, prefill_tokens_per_s, step_points
from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.simulate import simulate
from tasks.planning.division import assign_groups
from tasks.planning.makespan import member_time_s
from tests.property_examples import part_of_examples

FILES = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
OF_PAPERS = [name for name in FILES if name != "wide"]
SIZES = {
    "8b": (8.19e9, 147_456),
    "14b": (14.77e9, 163_840),
    "3b": (3.09e9, 36_864),
    "72b": (72.7e9, 327_680),
    "7b": (7.62e9, 57_344),
    "32b": (32.76e9, 262_144),
}
# Accelerator, contexts in tokens, and seconds of a step besides the plain roofline, to which the knobs were fitted.
CURVES = {"rlboost": ("H100-80GB", 3000, 0.0), "streamrl": ("H800", 5000, 0.0), "rlhfless": ("L40S", 400, 0.01)}


def small():
    return with_work(scenario("rlboost_14b"), num_prompts_per_step=8, iterations=2)


@pytest.mark.parametrize("name", FILES)
def test_every_parameter_of_a_scenario_has_a_source(name):
    sources = " ".join(scenario(name).sources)
    for parameter in (
        "step_s",
        "responses_max",
        "link_gbps",
        "usd_per_h",
        "train_s_per_token",
        "num_prompts_per_step",
        "lengths.cap",
        "lengths.median",
        "lengths.sigma",
    ):
        assert parameter in sources, parameter


@pytest.mark.parametrize("name", OF_PAPERS)
def test_step_times_are_the_roofline_that_the_source_names(name):
    paper, size = name.split("_")
    kind, context, besides_s = CURVES[paper]
    parameters, cache = SIZES[size]
    # Without layers a step has no constant but STEP_S, and its GPUs exchange nothing.
    model = ModelSize(parameters=parameters, weight_bytes=2, kv_bytes_per_token=cache, layers=0)
    loaded = scenario(name)
    for pool, found in zip(loaded.pools, (kind, "H20"), strict=False):
        device = Device(accelerator=accelerator(found), gpus=int(pool.gpus), bandwidth_efficiency=0.6, mfu=0.4)
        expected = step_points(model, device, pool.responses_max, context)
        assert [b for b, _ in pool.step_s] == [b for b, _ in expected]
        assert [s for _, s in pool.step_s] == pytest.approx([s - STEP_S + besides_s for _, s in expected], rel=1e-3)
        assert pool.prefill_tokens_per_s == pytest.approx(prefill_tokens_per_s(model, device), rel=1e-3)
    assert loaded.trainer.step_s == loaded.pools[0].step_s
    assert loaded.policy.weights_bytes == pytest.approx(2 * parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("paper", "files", "knobs"),
    [
        (rlboost, "rlboost_*", {"responses_max": "32", "lengths.sigma": "0.5", "instances of 32B": "7"}),
        (streamrl, "streamrl_*", {"lengths.sigma": "1.0"}),
        (
            rlhfless,
            "rlhfless_*",
            {"lengths.sigma": "0.4", "lengths.rho": "0.98", "lengths.epoch_change_tokens": "45.0"},
        ),
    ],
)
def test_every_knob_is_declared_and_the_files_have_its_value(paper, files, knobs):
    assert paper.KNOBS.keys() == knobs.keys()
    for path in SCENARIOS.glob(files + ".yaml"):
        loaded = scenario(path.stem)
        found = {
            "responses_max": loaded.trainer.responses_max,
            "lengths.sigma": loaded.work.lengths.sigma,
            "lengths.rho": loaded.work.lengths.rho,
            "lengths.epoch_change_tokens": loaded.work.lengths.epoch_change_tokens,
            "instances of 32B": rlboost.MODELS["32B"].instances,
        }
        for knob, value in knobs.items():
            assert found[knob] == float(value)
            assert paper.KNOBS[knob].startswith(f"{value}, fitted on")


def test_the_closed_form_says_what_follows_from_the_inputs_alone():
    eight, fourteen = rlboost.MODELS["8B"], rlboost.MODELS["14B"]
    # 132 s of training and 1,120 engine-seconds on 4 engines and 3.8 instances: 412 s alone, 214 s beside these.
    assert eight.closed_form().endswith("gives 1.93 and 1.55 per dollar")
    assert "gives 2.26 and" in fourteen.closed_form()
    assert rlboost.MODELS["32B"].closed_form() == ""


def test_more_responses_in_flight_stay_on_the_roofline():
    wide = rlboost_sensitivity.arms(None)["128 in flight"].scenario
    model = ModelSize(parameters=14.77e9, weight_bytes=2, kv_bytes_per_token=163_840, layers=0)
    device = Device(accelerator=accelerator("H100-80GB"), gpus=2, bandwidth_efficiency=0.6, mfu=0.4)
    expected_s = decode_step_s(model, device, 128, 3000) - STEP_S
    for found in (wide.pools[0], wide.trainer):
        assert (found.responses_max, found.step_s[-1][0]) == (128, 128)
        assert found.step_s[-1][1] == pytest.approx(expected_s, rel=0.01)


@pytest.mark.slow
def test_rollout_work_and_training_time_are_those_of_the_papers_code():
    for name, work_s, train_s in (("rlboost_14b", 2130, 410), ("rlboost_8b", 1120, 132)):
        three = with_work(with_counts(scenario(name), [(0.0, 3)]), iterations=5)
        got = run_all({"three": Arm(scenario=three, settle=2)}, (1, 2), 0)
        assert got.median("three", "engine_s") == pytest.approx(work_s, rel=0.05)
        assert got.median("three", "train_s") == pytest.approx(train_s, rel=0.05)


def test_colocated_is_generation_then_training_on_the_trainers_machines_alone():
    outcome = run(Arm(scenario=colocated(small())), 1)
    assert outcome.members == outcome.crew_gpu_s == 0
    assert outcome.duration_s == pytest.approx(outcome.rollout_s + outcome.train_s)
    assert outcome.usd > 0


@pytest.mark.slow
def test_outcomes_are_medians_of_ratios_of_the_same_seed():
    half = with_work(small(), num_prompts_per_step=4)
    got = run_all({"whole": Arm(scenario=small()), "half": Arm(scenario=half, minor=True)}, (1, 2, 3), 0)
    assert len(got.of("whole")) == 3
    assert len(got.of("half")) == 1
    assert got.ratio("tokens", "half", "whole") == got.of("half")[0].tokens / got.of("whole")[0].tokens
    assert got.best("tokens", "") == "whole"
    assert got.best("tokens", "", min) == "half"
    assert not got.stalled("whole")


@pytest.mark.slow
def test_processes_find_what_this_one_finds():
    arms = {"whole": Arm(scenario=small()), "colocated": Arm(scenario=colocated(small()))}
    here, there = run_all(arms, (1, 2), 0), run_all(arms, (1, 2), 2)
    assert [here.of(arm) for arm in arms] == [there.of(arm) for arm in arms]


def test_preemption_changes_the_named_iteration_only_and_costs_more_without_the_journal():
    # One iteration takes some 100 s, so that a loss after 20 s finds responses half done.
    six = with_work(with_counts(scenario("rlboost_14b"), [(0.0, 6)]), num_prompts_per_step=32, iterations=2)
    lost = Preemption(iteration=1, after_s=40.0, left=3)
    arms = {"undisturbed": Arm(scenario=six)}
    for resume in ("token", "response"):
        arms[resume] = Arm(scenario=with_policy(six, resume=resume), preemption=lost)
    got = run_all(arms, (1,), 0)
    last_s = {arm: got.of(arm)[0].last_s for arm in arms}
    first_s = {arm: 2 * got.of(arm)[0].duration_s - last_s[arm] for arm in arms}
    assert first_s["token"] == pytest.approx(first_s["undisturbed"])
    assert last_s["undisturbed"] < last_s["token"] < last_s["response"]
    assert got.of("token")[0].regenerated < got.of("response")[0].regenerated
    share = 1 - (last_s["token"] - last_s["undisturbed"]) / (last_s["response"] - last_s["undisturbed"])
    assert got.kept_share("token", "response", "undisturbed") == pytest.approx(share)


@pytest.mark.slow
def test_settling_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match=r"2 iterations; allowed: more than settle \(2\)"):
        run(Arm(scenario=small(), settle=2), 1)


@pytest.mark.slow
def test_a_run_that_stalls_has_no_throughput_and_says_so():
    nobody = with_policy(with_counts(small(), [(0.0, 1), (1.0, 0)]), planning={"seeding": "off"})
    arms = {"stalled": Arm(scenario=nobody), "whole": Arm(scenario=small())}
    got = run_all(arms, (1,), 0)
    assert got.stalled("stalled").startswith("1 of 1 stall (")
    assert got.ratio("tokens_per_s", "stalled", "whole") == 0
    assert got.ratio("tokens_per_usd", "stalled", "whole") == 0


@pytest.mark.parametrize(
    ("ours", "published", "to", "share", "verdict", "off"),
    [
        (1.1, 1.0, None, False, "inside", 0.1),
        (0.8, 1.0, None, False, "outside", 0.2),
        (1.3, 1.2, 1.4, False, "inside", 0.0),
        (1.7, 1.2, 1.4, False, "outside", 0.3 / 1.4),
        (0.45, 0.33, None, True, "inside", 0.12),
        (0.5, 0.33, None, True, "outside", 0.17),
    ],
)
def test_verdicts(ours, published, to, share, verdict, off):
    found = Finding(paper="P", what="w", ours=ours, published=published, to=to, mark="[P]", share=share)
    assert found.verdict == verdict
    assert found.off == pytest.approx(off)
    target = found.target()
    assert target is not None
    assert target.met == (verdict == "inside")
    fitted = replace(found, fitted=True)
    assert fitted.verdict == f"fitted, {verdict}"
    assert fitted.target() is None


def test_what_follows_from_others_or_would_be_met_by_no_effect_is_marked():
    plain = Finding(paper="P", what="w", ours=1.4, published=1.5, mark="[P]")
    assert (plain.row()["but"], plain.no_effect) == ("", False)
    follows = replace(plain, follows="throughput")
    assert follows.row()["but"] == "follows from throughput"
    near = replace(plain, ours=1.1, published=1.08)
    assert near.row()["but"] == "no effect would be inside"
    assert replace(near, published=1.25, to=1.5).no_effect is False
    share = replace(plain, ours=0.1, published=0.14, share=True)
    assert share.no_effect
    assert not replace(share, published=0.33).no_effect
    assert not replace(plain, published=0.0, to=10.0).no_effect
    fitted, outside = replace(plain, fitted=True), replace(plain, ours=3.0)
    assert summary([plain, follows, near, fitted, outside, replace(plain, published=None)]) == (
        "3 of 4 published figures that nothing was fitted to are inside; of these 1 follow from others by arithmetic, "
        "and 1 would be met by no effect, which leaves 1; besides 1 fitted, of which 1 are inside"
    )


def test_without_a_published_figure_there_is_a_target_only_where_a_least_was_set():
    plain = Finding(paper="P", what="w", ours=0.9)
    assert (plain.verdict, plain.target(), plain.row()["published"]) == ("", None, "")
    least = replace(plain, least=1.0)
    target = least.target()
    assert target is not None
    assert (least.verdict, target.met) == ("missed", False)
    assert replace(least, ours=1.0).verdict == "reached"
    nearly = replace(least, ours=1 - 1e-9)  # a ratio of two equal sums
    assert (nearly.verdict, nearly.target().met) == ("reached", True)
    most = replace(plain, most=0.8)
    assert (most.verdict, most.target().bound) == ("missed", "<= 0.8")
    assert replace(most, ours=0.8).verdict == "reached"


@settings(max_examples=part_of_examples(0.5))
@given(seed=st.integers(1, 1000), members=st.integers(1, 6), share=st.floats(0.1, 1.0))
def test_global_cut_spends_what_lockstep_decoding_spends(seed, members, share):
    cheap = with_pool(with_work(scenario("rlhfless_3b"), num_prompts_per_step=24), prefill_tokens_per_s=1e12)
    spent = crew_gpu_s(cheap, members, share, seed, 0)
    pool = cheap.pools[0]
    lengths = ResponseLengths(cheap.work, seed).lengths(0)
    alone = [
        member_time_s(lengths[list(groups)], pool.step_time, pool.responses_max)
        for groups in assign_groups(len(lengths), members)
    ]
    # All of them until the last response is the most, because two batches in one take no longer than one after another;
    # all tokens at the rate of a full batch are the least.
    full_s = float(lengths.sum()) * pool.step_time.step_s(pool.responses_max) / pool.responses_max
    assert pool.gpus * full_s <= spent * (1 + 1e-9)
    if share == 1.0 or members == 1:
        assert spent == pytest.approx(pool.gpus * members * max(alone))
    assert spent <= pool.gpus * members * max(alone) * (1 + 1e-6)


def test_global_cut_refuses_what_would_have_to_wait():
    crowded = with_pool(scenario("rlhfless_3b"), responses_max=8)
    with pytest.raises(ValueError, match="responses_max: value 8; allowed: at least 512"):
        crew_gpu_s(crowded, 1, 0.7, 1, 0)


def test_one_static_actor_spends_in_the_simulator_what_the_replay_says():
    one = rlhfless.static(with_work(scenario("rlhfless_3b"), num_prompts_per_step=32, iterations=1), 1)
    lived = simulate(one, seed=1).iterations[0]
    replayed = crew_gpu_s(one, 1, 1.0, 1, 0)
    decoded_s = sum(lived.seconds["rollout"][part] for part in ("useful", "wasted"))
    assert decoded_s * one.pools[0].gpus == pytest.approx(replayed, rel=0.02)
    assert not np.isnan(lived.seconds[TRAIN_POOL]["train"])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_finding_has_arms_and_every_arm_runs():
    arms = {name: small_arm(arm) for name, arm in rlhfless.arms().items()}
    found = rlhfless.findings(run_all(arms, (1,), 0), (1,))
    assert all(finding.ours > 0 for finding in found)
    assert len({finding.what for finding in found}) == len(found)


@pytest.mark.slow
def test_an_outage_costs_little_with_seeding_and_an_order_more_without():
    found = outage.findings(run_all(outage.arms(), (1,), 0))
    bounded = [finding for finding in found if finding.most is not None]
    assert len(bounded) == 4
    assert {finding.verdict for finding in bounded} == {"reached"}
    unseeded = [finding for finding in found if finding.what.endswith("without seeding")]
    assert len(unseeded) == 2
    assert min(finding.ours for finding in unseeded) > 10.0
    assert sum("1 of 1 stall" in finding.comment for finding in found) == 2


@pytest.mark.slow
def test_an_outage_is_dear_without_seeding():
    arms = {name: arm for name, arm in outage.arms().items() if name in ("14B colocated", "14B outage")}
    never = with_policy(arms["14B outage"].scenario, planning={"seeding": "off"})
    arms["never seeds"] = replace(arms["14B outage"], scenario=never)
    got = run_all(arms, (1,), 0)
    assert got.ratio("last_s", "never seeds", "14B colocated") > 10.0
    assert got.ratio("last_s", "14B outage", "14B colocated") < outage.OVER_COLOCATED_MAX


def small_arm(arm):
    """With an eighth of the prompts."""
    work = arm.scenario.work
    prompts = max(8, work.num_prompts_per_step // 8)
    dataset = None if work.prompts_in_dataset is None else 4 * prompts
    return replace(arm, scenario=with_work(arm.scenario, num_prompts_per_step=prompts, prompts_in_dataset=dataset))


@pytest.mark.slow
def test_a_planner_that_knows_of_waiting_for_tools_takes_fewer_members_and_is_worth_more():
    wait = "8 answers of 30 s"
    arms = {name: arm for name, arm in shortened(tools.arms()).items() if name.rpartition(",")[0] == wait}
    got = run_all(arms, (1, 2), 0)
    assert got.ratio("worth", f"{wait}, told", f"{wait}, not told") > 1.02
    assert got.median(f"{wait}, told", "members") < got.median(f"{wait}, not told", "members") / 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_rlboost_and_together_compare_arms_that_exist():
    for paper, lines in ((rlboost.PAPER, 43), (together.PAPER, 22), (wide.PAPER, 6), (tools.PAPER, 15)):
        arms = {name: small_arm(arm) for name, arm in shortened(seeds.PAPERS[paper].arms(None)).items()}
        found = seeds.PAPERS[paper].findings(run_all(arms, (1,), 0), (1,))
        assert len(found) == len({finding.what for finding in found}) == lines


def shortened(arms):
    return {
        name: replace(
            arm, span_s=None, scenario=with_work(arm.scenario, iterations=min(6, arm.scenario.work.iterations))
        )
        for name, arm in arms.items()
    }


def test_a_trace_takes_the_place_of_the_process(tmp_path):
    lines = ["0,add,a", "0,add,b", "600000,remove,a", "900000,add,c", "7200000,remove,b"]
    (tmp_path / "p3-trace.csv").write_text("\n".join(lines) + "\n")
    given = rlboost.on_trace("rlboost_14b", tmp_path)
    assert given.pools[0].availability.path == str(tmp_path / "p3-trace.csv")
    two = with_work(rlboost.fixed(given, 2), num_prompts_per_step=8, iterations=2)
    assert run(Arm(scenario=two), 1).iterations == 2


def test_the_command_refuses_what_it_cannot_use(capsys, tmp_path):
    for arguments, complaint in (
        (["--seeds", "0"], "--seeds, --workers: value 0, 2"),
        (["--traces", str(tmp_path)], "allowed: a folder with p3-trace.csv"),
        (["--paper", "Unknown"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            seeds.main(arguments)
        assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(capsys):
    seeds.main(["--json", "--paper", "StreamRL", "--seeds", "1", "--workers", "0"])
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary["conditions"]["knobs"] == {"StreamRL": streamrl.KNOBS}
    assert {row["verdict"] for row in summary["rows"]} >= {"inside"}
    assert all(set(target) == {"value", "bound", "met"} for target in summary["targets"].values())
    assert Path(SCENARIOS, "streamrl_72b.yaml").exists()
