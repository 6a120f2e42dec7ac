"""The setups that a forecast compares; each is a configuration that `gleaner check` accepts."""

from typing import Any

import pytest

from tasks.configuration.run_config import RunConfig, dump, parse
from tasks.forecasting.comparison import forecast, refusal, with_settings
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.setups import Setup, setups
from tasks.preparing.checks import check_settings
from tests.forecast_documents import document

UNPROBED = NoProbe(reason="not asked")
H100 = {"machine": "p5.48xlarge", "gpus": 1, "count": 2}
FAR = {"far": {"machine": "g6.xlarge", "gpus": 1, "count": 4, "egress_usd_per_gb": 0.02}}


def compared(**sections: Any) -> tuple[RunConfig, dict[str, Setup]]:
    config = parse(document(**sections))
    return config, {setup.name: setup for setup in setups(config, gather(config, UNPROBED))}


def test_every_setup_is_a_configuration_that_is_accepted_and_gives_its_scenario():
    parallel = {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}
    eight = {"machine": "p5.48xlarge", "gpus": 8, "count": 2}
    for sections in (
        {},
        {"pools": {"more_rollout": FAR}},
        {"lora": {}, "rollout": {"crew": "standing"}},
        {"pools": {"rollout": {**eight, "count_min": 0}, "train": {**eight, "count": 1}}, "rollout": parallel},
        {
            "pools": {"rollout": {**eight, "count_min": 0}, "train": {**eight, "count": 1}},
            "rollout": parallel,
            "trainer": {"nproc_per_node": 8},
            "planning": {"seeding": "off"},
        },
    ):
        config, found = compared(**sections)
        for setup in found.values():
            accepted = parse(with_settings(dump(config), setup.settings))
            check_settings(accepted)
            [again] = [one for one in setups(accepted, gather(accepted, UNPROBED)) if one.name == "as configured"]
            pools = [pool for pool in again.scenario.pools if pool.count]
            assert [(p.name, p.count, p.usd_per_h, p.gpus) for p in pools] == [
                (p.name, p.count, p.usd_per_h, p.gpus) for p in setup.scenario.pools
            ]
            assert again.scenario.policy == setup.scenario.policy


def test_each_pool_is_compared_alone_and_all_are_scaled_together():
    _, found = compared(pools={"rollout": {**H100, "count_min": 0}, "more_rollout": FAR})
    widths = {name: {p.name: p.count for p in setup.scenario.pools} for name, setup in found.items()}
    assert widths["as configured"] == {"rollout": 2, "far": 4}
    assert widths["reserved only"] == {}
    assert widths["far only, 8"] == widths["reserved + far, 8"] == {"far": 8}
    assert widths["rollout only, 1"] == {"rollout": 1}
    assert widths["half of every pool"] == {"rollout": 1, "far": 2}
    assert widths["twice every pool"] == widths["width by cost"] == {"rollout": 4, "far": 8}
    assert found["far only, 8"].settings["pools.rollout.count"] == 0
    assert found["far only, 8"].scenario.pools[0].egress_usd_per_gb == 0.02


def test_setups_have_no_gpus_that_no_engine_uses():
    parallel = {"engine": "vllm", "vllm": {"tensor_parallel_size": 4}}
    eight = {"machine": "p5.48xlarge", "gpus": 8, "count": 2}
    _, found = compared(pools={"rollout": eight}, rollout=parallel, planning={"seeding": "off"})
    [wasteful], [tight] = found["as configured"].scenario.pools, found["spot only, 2"].scenario.pools
    assert (wasteful.gpus, tight.gpus) == (8, 4)
    assert tight.usd_per_h == pytest.approx(wasteful.usd_per_h / 2)
    assert found["spot only, 2"].settings["pools.rollout.gpus"] == 4


def test_seeding_is_no_setup_where_the_configuration_refuses_it():
    parallel = {"engine": "vllm", "vllm": {"tensor_parallel_size": 4}}
    eight = {"machine": "p5.48xlarge", "gpus": 8}
    pools = {"rollout": {**eight, "gpus": 4}, "train": eight}
    _, found = compared(pools=pools, rollout=parallel, trainer={"nproc_per_node": 8}, planning={"seeding": "off"})
    assert {setup.settings["planning.seeding"] for setup in found.values()} == {"off"}
    placed = {"placement": "pod"}
    _, found = compared(trainer=placed, planning={"seeding": "off"})
    assert {setup.settings["planning.seeding"] for setup in found.values()} == {"off"}


def test_setups_that_are_compared_cut_nothing_because_their_machines_stay_paid_for():
    saving = {"objective": "gpu_seconds", "cut_share": 0.7}
    _, found = compared(planning=saving)
    cuts = {name: setup.scenario.policy.planning.cut_share for name, setup in found.items()}
    assert cuts.pop("as configured") == 0.7
    assert {*cuts.values()} == {None}
    # What is configured on a width that is compared is not left out, because that cuts.
    assert found["reserved only"].settings["planning.cut_share"] is None
    _, without = compared(planning={"objective": "gpu_seconds"})
    assert not any("planning.cut_share" in setup.settings for setup in without.values())


def test_what_check_refuses_is_refused_with_its_reason():
    config = parse(document(planning={"seeding": "off"}))
    assert refusal(config, {"pools.rollout.count": 3}) is None
    assert refusal(config, {"pools.rollout.count": 0, "pools.rollout.count_min": 0}) == (
        "pools.rollout.count: value 0; allowed with planning.seeding 'off': at least 1 in one pool of the crew"
    )
    assert (refusal(config, {"pools.rollout.machine": "abacus"}) or "").startswith(
        "pools.rollout.machine: no price for 'abacus'"
    )


def test_the_recommended_settings_are_accepted():
    for sections in ({}, {"planning": {"seeding": "off"}}, {"pools": {"more_rollout": FAR}}):
        config = parse(document(**sections))
        record = forecast(config, UNPROBED, created_at_s=0.0)
        assert refusal(config, record.snippet) is None
