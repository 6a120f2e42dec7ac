"""All measurements that need a GPU, in one command and in a given number of minutes.

`python -m benchmarks.gpu --plan 10 --json` on one GPU. It prints which part may take how long, and each figure at once,
in a line that begins with ##. Each part runs in a process of its own, which is ended when its minutes are over; what it
had measured counts. A part that cannot run here (no vLLM, no GPU) is skipped, and one that breaks down is reported as
failed; both give a reason. Models are random and have real shapes; nothing is downloaded. `--device cpu --small` tries
the same code on a CPU; its figures mean nothing.
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict

from benchmarks.gpu.part import PARTS, Outcome, run_part
from benchmarks.gpu.report import decode_share, rows, targets
from benchmarks.gpu.schedule import chosen, lines, run_in_turn
from benchmarks.gpu.sizes import SHAPES, size_for
from benchmarks.reporting import finish

# Of the plan's minutes, for the last part's end and for the report.
_ENDING_MINUTES = 0.1


def report(outcomes: dict[str, Outcome], notes: dict[str, object], *, as_json: bool, on_gpu: bool) -> None:
    """Print table, targets, and JSON with every part's figures, or the reason why it has none."""
    figures = {part: outcome.figures for part, outcome in outcomes.items() if outcome.figures}
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


def tell(part: str, outcome: Outcome, *, as_json: bool) -> None:
    """Print how a part ended; its figures are printed already."""
    print(f"{part} {outcome.status}{': ' if outcome.reason else ''}{outcome.reason}")
    if as_json:
        print(json.dumps({"part": part, **asdict(outcome)}))
    sys.stdout.flush()


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
    parser.add_argument("--plan", type=float, metavar="MINUTES", help="the time for all parts; without it all run")
    options = parser.parse_args()
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu: the full size is for a GPU; allowed: with --small")
    # A part is a session of its own, and would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parts = chosen(options.part or [], {name: part.minutes for name, part in PARTS.items()})
    minutes = sum(parts.values()) if options.plan is None else options.plan
    print("\n".join(lines(minutes, parts)), flush=True)
    with tempfile.TemporaryDirectory() as caches:
        size = size_for(options.device, options.model, small=options.small, caches=caches)

        def run(part: str, limit_s: float) -> Outcome:
            print(f"{part} ...", file=sys.stderr, flush=True)
            return run_part(part, size, options.model, limit_s)

        ending = 0.0 if options.plan is None else _ENDING_MINUTES
        outcomes = run_in_turn(
            minutes - ending, parts, run, lambda part, outcome: tell(part, outcome, as_json=options.json)
        )
    notes = {"device": options.device, "model": "small" if options.small else options.model, "minutes": minutes}
    report(outcomes, notes, as_json=options.json, on_gpu=options.device == "cuda")
    statuses = {outcome.status for outcome in outcomes.values()}
    sys.exit(int("failed" in statuses or "measured" not in statuses))


if __name__ == "__main__":
    main()
