"""All measurements that need a GPU, in one command: keyed noise, engines, and the trainer's step.

`python -m benchmarks.gpu --json` takes some minutes on one GPU. Each part runs in a process of its own. A part that
cannot run here (no vLLM, no GPU) is skipped, and one that breaks down is reported as failed; both give a reason. The
model is random and has a real shape. `--device cpu --small` tries the same code on a CPU; its figures mean nothing.
"""

import argparse
import sys

from benchmarks.gpu.part import PARTS, Outcome, run_part
from benchmarks.gpu.report import decode_share, rows, targets
from benchmarks.gpu.sizes import SHAPES, size_for
from benchmarks.reporting import finish


def report(outcomes: dict[str, Outcome], notes: dict[str, object], *, as_json: bool, on_gpu: bool) -> None:
    """Print table, targets, and JSON with every part's figures, or the reason why it has none."""
    figures = {part: outcome.figures for part, outcome in outcomes.items() if outcome.status == "measured"}
    reasons = {
        status: {part: outcome.reason for part, outcome in outcomes.items() if outcome.status == status}
        for status in ("skipped", "failed")
    }
    missing = [
        {"measure": part, "value": f"{status}: {reason}"}
        for status, parts in reasons.items()
        for part, reason in parts.items()
    ]
    finish(
        "gpu",
        [*rows(figures), *missing],
        targets(figures) if on_gpu else [],
        as_json=as_json,
        notes=notes,
        results={**figures, **reasons, "keyed_noise_share_of_decode_step": decode_share(figures)},
    )


def main() -> None:
    """Parse, run the parts one after another, report; exit status 1 if one failed or nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument(
        "--part", choices=(*PARTS, "all"), action="append", help="again for further parts; all by default"
    )
    parser.add_argument("--model", choices=SHAPES, default="0.5b", help="shape of the random model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="little work, to try the code; needed with --device cpu")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="a part that takes longer has failed")
    options = parser.parse_args()
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu: the full size is for a GPU; allowed: with --small")
    size = size_for(options.device, options.model, small=options.small)
    asked = set(options.part or ["all"])
    outcomes = {}
    for part in PARTS:
        if asked & {part, "all"}:
            print(f"{part} ...", file=sys.stderr, flush=True)
            outcomes[part] = run_part(part, size, options.model, options.limit_s)
    notes = {"device": options.device, "model": "small" if options.small else options.model}
    report(outcomes, notes, as_json=options.json, on_gpu=options.device == "cuda")
    statuses = {outcome.status for outcome in outcomes.values()}
    sys.exit(int("failed" in statuses or "measured" not in statuses))


if __name__ == "__main__":
    main()
