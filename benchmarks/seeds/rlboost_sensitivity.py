"""What RLBoost's headline (14B) depends on: prices, losses, starts, the tail, and what was derived from RLBoost."""

from dataclasses import replace
from pathlib import Path

from benchmarks.seeds.arms import Arm, Outcomes, colocated, with_pool, with_work
from benchmarks.seeds.findings import Finding
from benchmarks.seeds.rlboost import MODELS, PAPER, SEGMENT_S, fixed, on_trace
from resources.accelerators import accelerator
from resources.model_size import ModelSize
from resources.spot_trace import PROCESSES
from tasks.forecasting.engine_estimate import Device, bandwidth_reached, step_points
from tasks.forecasting.scenario import AvailabilityScenario, Scenario

# Responses in flight that RLBoost's own figures did not choose.
IN_FLIGHT = (64, 128)
CONSTANTS = "step times with constants"
HELD_BACK = "losses as in "
BASE = "14B colocated"


def arms(traces: Path | None) -> dict[str, Arm]:
    """The headline's arm with one thing changed in each; traces as in benchmarks.seeds.rlboost."""
    given = on_trace(MODELS["14B"].scenario, traces)
    return _sensitivity(given) | _underived(given, traces)


def findings(got: Outcomes) -> list[Finding]:
    """Each over colocated; nothing here is published."""
    return [*_of_sensitivity(got), *_of_underived(got)]


def _sensitivity(given: Scenario) -> dict[str, Arm]:
    def arm(changed: Scenario) -> Arm:
        return Arm(scenario=fixed(changed, MODELS["14B"].instances), span_s=SEGMENT_S, settle=1, minor=True)

    pool = given.pools[0]
    found = {f"spot price x{factor}": arm(with_pool(given, usd_per_h=pool.usd_per_h * factor)) for factor in (0.5, 2)}
    if pool.availability is not None:
        for factor in (0.1, 0.3, 3.0):
            hastened = replace(pool.availability, rate_factor=factor)
            found[f"losses x{factor:g}"] = arm(with_pool(given, availability=hastened))
    for start_s in (30.0, 300.0):
        found[f"cold start {start_s:.0f} s"] = arm(with_pool(given, start_s=start_s))
    for sigma in (0.3, 0.8, 1.2):
        tail = with_work(given, lengths={"sigma": sigma})
        found[f"sigma {sigma}"] = arm(tail)
        found[f"sigma {sigma} colocated"] = Arm(scenario=with_work(colocated(tail), iterations=6), minor=True)
    return found


def _underived(given: Scenario, traces: Path | None) -> dict[str, Arm]:
    """The headline with other responses in flight, and with losses that nothing was fitted to, each over colocated.

    The held-back traces are the other processes of resources.spot_trace and the other files of the folder.
    """
    found = {}
    for most in IN_FLIGHT:
        changed = _in_flight(given, most)
        found[f"{most} in flight"] = Arm(scenario=fixed(changed, MODELS["14B"].instances), span_s=SEGMENT_S, settle=1)
        found[f"{most} in flight colocated"] = Arm(scenario=with_work(colocated(changed), iterations=6))
    changed = _with_constants(given)
    found[CONSTANTS] = Arm(scenario=fixed(changed, MODELS["14B"].instances), span_s=SEGMENT_S, settle=1)
    found[f"{CONSTANTS} colocated"] = Arm(scenario=with_work(colocated(changed), iterations=6))
    held_back = {name: AvailabilityScenario(process=name) for name in PROCESSES if name != "aws-p3"}
    for path in sorted(traces.iterdir()) if traces is not None else ():
        if path.suffix in (".csv", ".json", ".txt") and path.name != "p3-trace.csv":
            held_back[path.stem] = AvailabilityScenario(path=str(path))
    for name, availability in held_back.items():
        changed = with_pool(fixed(given, MODELS["14B"].instances), availability=availability)
        found[f"{HELD_BACK}{name}"] = Arm(scenario=changed, span_s=SEGMENT_S, settle=1)
    return found


def _in_flight(given: Scenario, most: int) -> Scenario:
    """The scenario with engines that decode more at once: the roofline is a line from 16 on, up to some 200."""
    (before, before_s), (last, last_s) = given.pools[0].step_s[-2:]
    longer = (most, last_s + (last_s - before_s) / (last - before) * (most - last))
    step_s = (*given.pools[0].step_s, longer)
    trainer = replace(given.trainer, responses_max=most, step_s=step_s)
    return replace(with_pool(given, responses_max=most, step_s=step_s), trainer=trainer)


def _with_constants(given: Scenario) -> Scenario:
    """The scenario with the step times that a forecast estimates: Qwen3-14B on two H100s, contexts of 3,000 tokens."""
    model = ModelSize(parameters=14.77e9, weight_bytes=2, kv_bytes_per_token=163_840, layers=40)
    h100 = accelerator("H100-80GB")
    device = Device(accelerator=h100, gpus=2, bandwidth_efficiency=bandwidth_reached(h100), mfu=0.4)
    step_s = step_points(model, device, given.trainer.responses_max, 3000)
    return replace(with_pool(given, step_s=step_s), trainer=replace(given.trainer, step_s=step_s))


def _of_sensitivity(got: Outcomes) -> list[Finding]:
    names = ["spot price x0.5", "spot price x2", "losses x0.1", "losses x0.3", "losses x3"]
    names += ["cold start 30 s", "cold start 300 s", "sigma 0.3", "sigma 0.8", "sigma 1.2"]
    found = []
    for name in names:
        base = f"{name} colocated" if name.startswith("sigma") else BASE
        found.append(
            Finding(
                paper=PAPER,
                what=f"14B, {name}: tokens per dollar over veRL",
                ours=got.ratio("tokens_per_usd", name, base),
                comment=f"throughput {got.ratio('tokens_per_s', name, base):.2f}x",
            )
        )
    return found


def _of_underived(got: Outcomes) -> list[Finding]:
    compared = [(f"{most} in flight", f"{most} in flight colocated") for most in IN_FLIGHT]
    compared.append((CONSTANTS, f"{CONSTANTS} colocated"))
    compared += [(arm, BASE) for arm in got.names(HELD_BACK)]
    return [
        Finding(
            paper=PAPER,
            what=f"14B, {arm}: throughput over veRL",
            ours=got.ratio("tokens_per_s", arm, other),
            comment=f"{got.ratio('tokens_per_usd', arm, other):.2f}x per dollar; 1.97 and 1.49 published; "
            f"{got.median(arm, 'members'):.1f} instances in use",
        )
        for arm, other in compared
    ]
