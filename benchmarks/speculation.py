"""What drafts change and save: the same tokens for every drafter, steps by source, and seconds of a long tail.

Run: python -m benchmarks.speculation --json (10 min of processor time; --parts for some of them). The policy is the
demo's, warm-started on worked sums; identity is shown in five families of random models, too. The long tail is paced
(benchmarks/paced_drafts.py). Nothing here runs on a GPU.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from benchmarks.draft_identity import Found, families, identical
from benchmarks.draft_models import distil, distilled_drafter
from benchmarks.draft_sources import two_epochs
from benchmarks.paced_drafts import IDLE_WITHIN, TAIL_MAX, long_tails
from benchmarks.reporting import Target, finish, interleave, ratios
from examples.warm_start import WarmStart, warm_start
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.learning.pretrained import read_tensors
from tasks.prompts.arithmetic import problem
from tasks.sampling.engines.drafter import Drafter
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, changing, perfect, wrong
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.torch_engine import TorchEngine

GROUPS, GENERATIONS, CONTEXT_LENGTH = 32, 8, 256
SAMPLING = SamplingParams(max_completion_length=160, stop_token_ids=(2,))
PARTS = ("paced", "families", "demo")
DRAFTS = (1, 2, 4, 8)
GREEDY = "draft model, most likely tokens"
DRAFTS_OF: dict[str, tuple[int | Literal["auto"], ...]] = {"draft model": (1, 4, "auto"), GREEDY: (4,)}


@dataclass(frozen=True)
class Decoded:
    """What an engine gave for all requests: tokens and log-probs by response, the number of steps, and seconds."""

    found: Found
    steps: int
    seconds: float


def requests_of(directory: Path, iteration: int, groups: int) -> list[GenerationRequest]:
    """The groups of an iteration: in each the same prompts, and other noise."""
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    prompts = [tuple(tokenizer(problem(7, index, WarmStart().task).prompt)["input_ids"]) for index in range(groups)]
    numbers = range(groups * GENERATIONS)
    return [
        GenerationRequest(r, r // GENERATIONS, prompts[r // GENERATIONS], (), noise_key(3, iteration, r), SAMPLING)
        for r in numbers
    ]


def make_engine(directory: Path, rows: int, speculation: Speculation | None) -> TorchEngine:
    engine = TorchEngine(
        directory,
        device="cpu",
        max_responses_in_flight=rows,
        context_length=CONTEXT_LENGTH,
        speculation=speculation,
    )
    engine.load_weights(0, read_tensors(directory))
    return engine


def decode(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> Decoded:
    """Decode all requests; a response that ends makes room for the next."""
    waiting, flying, steps = list(requests), 0, 0
    found: Found = {request.response: ([], []) for request in requests}
    began_s = time.process_time()
    while waiting or flying:
        room = engine.max_responses_in_flight - flying
        if coming := waiting[:room]:
            engine.start(coming)
            flying += len(coming)
            del waiting[:room]
        steps += 1
        for delta in engine.step():
            tokens, logprobs = found[delta.response]
            tokens += delta.token_ids
            logprobs += delta.logprobs
            flying -= delta.finish_reason is not None
    return Decoded(found, steps, time.process_time() - began_s)


def drafters(wanted: Found, vocab_size: int) -> dict[str, Callable[[], Drafter]]:
    """By name, makers of drafters that know plain decoding's answers, or nothing."""

    def answer(request: GenerationRequest) -> Sequence[int]:
        return wanted[request.response][0]

    def scripted(share: Callable[[int], float], **given: Any) -> Callable[[], Drafter]:
        return lambda: ScriptedDrafter(vocab_size, share, **given)

    return {
        "perfect": scripted(perfect, answer=answer),
        "always wrong": scripted(wrong, answer=answer),
        "random": scripted(wrong, ragged=True),
        "right with 0.8": scripted(lambda _: 0.8, answer=answer, ragged=True),
        "changing": scripted(changing, answer=answer),
    }


def identity(directory: Path, requests: Sequence[GenerationRequest], plain: Decoded) -> list[dict[str, Any]]:
    """By scripted drafter and number of drafts, how many responses are those of plain decoding, and the steps."""
    vocab_size = len(AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False))
    table = []
    for name, make in drafters(plain.found, vocab_size).items():
        for drafts in DRAFTS:
            found = decode(make_engine(directory, 64, Speculation(make(), drafts)), requests)
            same = identical(found.found, plain.found)
            table.append(
                {"drafter": name, "drafts": drafts, "identical": same, "of": len(requests), "steps": found.steps}
            )
    return table


def sources(draft_model: Path) -> dict[str, Callable[[int], Drafter]]:
    """By name, makers of the drafters of a run, for so many rows."""
    return {
        "ngram": lambda rows: SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH, siblings=False),
        "siblings": lambda rows: SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH),
        "draft model": lambda rows: distilled_drafter(draft_model, rows, CONTEXT_LENGTH),
        GREEDY: lambda rows: distilled_drafter(draft_model, rows, CONTEXT_LENGTH, keyed=False),
    }


def steps_by_source(
    directory: Path, draft_model: Path, requests: Sequence[GenerationRequest], plain: Mapping[int, Decoded]
) -> list[dict[str, Any]]:
    """Steps and tokens by source, rows in flight and number of drafts."""
    table = []
    for rows, wanted in plain.items():
        for source, make in sources(draft_model).items():
            for drafts in DRAFTS_OF.get(source, (1, 4, 8, "auto")):
                speculation = Speculation(make(rows), drafts)
                found = decode(make_engine(directory, rows, speculation), requests)
                totals = speculation.totals
                table.append(
                    {
                        "rows": rows,
                        "source": source,
                        "drafts": drafts,
                        "identical": identical(found.found, wanted.found),
                        "of": len(requests),
                        "steps": found.steps,
                        "plain steps": wanted.steps,
                        "accepted": totals.accepted / max(1, totals.drafted),
                        "tokens/step": totals.tokens / found.steps,
                        "as fast": wanted.seconds / found.seconds,
                    }
                )
    return table


def few_rows(
    directory: Path, before: Found, requests: Sequence[GenerationRequest], rounds: int
) -> list[dict[str, Any]]:
    """Processor time of few rows in flight on this CPU, without drafts over with `auto`, in interleaved rounds."""
    rows, asked = 4, requests[: 4 * GENERATIONS]

    def arm(source: str | None) -> Callable[[], float]:
        def run() -> float:
            speculation = None
            if source is not None:
                drafter = SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH, siblings=source != "ngram")
                if source == "siblings and past":
                    for request in asked:
                        drafter.remember(request.prompt_ids, [before[request.response][0]])
                speculation = Speculation(drafter, "auto")
            return decode(make_engine(directory, rows, speculation), asked).seconds

        return run

    sources = ("ngram", "siblings", "siblings and past")
    found = interleave({"plain": arm(None)} | {source: arm(source) for source in sources}, rounds)
    return [
        {"rows": rows, "source": source, "drafts": "auto", "as fast": ratios(found["plain"], found[source])}
        for source in sources
    ]


def of_the_demo(folder: Path, warm_start_steps: int, groups: int, rounds: int) -> list[dict[str, Any]]:
    """The tables of the demo's policy: identity, sources, two epochs, and few rows."""
    model, early, half = folder / "model", folder / "early", folder / "half"
    warm_start(model, replace(WarmStart(), steps=warm_start_steps), lambda *_: None)
    warm_start(early, replace(WarmStart(), steps=warm_start_steps * 5 // 6), lambda *_: None)
    distil(model, half, warm_start_steps // 2)
    past = decode(make_engine(model, 64, None), requests_of(model, 0, groups)).found
    requests = requests_of(model, 1, groups)
    plain = {rows: decode(make_engine(model, rows, None), requests) for rows in (64, 8)}
    return [
        *identity(model, requests, plain[64]),
        *steps_by_source(model, half, requests, plain),
        *two_epochs((early, model), requests_of, groups, make_engine, decode, context_length=CONTEXT_LENGTH),
        *few_rows(model, past, requests, rounds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--warm-start-steps", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    targets: list[Target] = []
    if "paced" in given.parts:
        paced, found = long_tails(given.rounds)
        table += paced
        targets.append(Target("paced responses that drafts change", sum(row["changed"] for row in paced), "== 0"))
        bounds = (TAIL_MAX, 1 + IDLE_WITHIN, 1 + IDLE_WITHIN)
        for (name, ratio), bound in zip(found.items(), bounds, strict=True):
            targets.append(ratio.target(f"seconds over plain: {name}", f"<= {bound}"))
    with tempfile.TemporaryDirectory() as folder:
        if "families" in given.parts:
            table += families(Path(folder))
        if "demo" in given.parts:
            table += of_the_demo(Path(folder), given.warm_start_steps, given.groups, given.rounds)
    changed = sum(row["of"] - row["identical"] for row in table if "of" in row)
    targets.append(Target("responses that drafters change", changed, "== 0"))
    notes = {"rounds": given.rounds, "groups": given.groups, "warm-start steps": given.warm_start_steps}
    finish("speculation", table, targets, as_json=given.json, notes=notes)


if __name__ == "__main__":
    main()
