"""Post-training on toys: each part shows that one kind of learning reaches what its users expect of it.

`python -m benchmarks.post_training --json` runs all parts, `--parts distillation` some. A part takes minutes on a
laptop.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.post_training import distillation, over_runs, sft
from benchmarks.post_training.part import Part
from benchmarks.reporting import finish

PARTS: dict[str, Part] = {
    "distillation": distillation.measure,
    "over_runs": over_runs.measure,
    "sft": sft.measure,
}


def main() -> None:
    """Parse, run the parts one after another, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gleaner-post-training-") as folder:
        found = {}
        for name in given.parts:
            own = Path(folder) / name
            own.mkdir()
            found[name] = PARTS[name](own, range(given.seeds))
    finish(
        "post_training",
        [{"part": name} | dict(row) for name, outcome in found.items() for row in outcome.rows],
        [target for outcome in found.values() for target in outcome.targets],
        as_json=given.json,
        notes={"seeds": given.seeds},
        results={name: outcome.results for name, outcome in found.items()},
    )


if __name__ == "__main__":
    main()
