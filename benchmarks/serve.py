"""Claim: under kills each request to `gleaner serve` has one answer, with the tokens of an undisturbed server.

Run: python -m benchmarks.serve --json
Clients send requests under keys and ask again after every failure. Meanwhile the server, a member, or both are killed
by SIGKILL, in turn, and started again. Then a new server is asked every request once more, and a run without kills gets
the same windows of requests. The policy is random, of 0.4 million parameters; the responses are sampled. Last, requests
come at an interval to members of the scripted engine, whose lengths differ widely: the waits of short ones beside long
ones, with windows that overlap, and one after another.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reporting import Target, finish
from storage.records import layout, prompt_table
from storage.records.run import exists, read_plan
from storage.stores.connect import connect
from tasks.configuration.run_config import parse
from tasks.external.rollouts import Rollouts
from tasks.prompts.submitted import PROMPT, TOKENS
from tasks.serving.serve_command import KEY_VARIABLE, WINDOWS_AHEAD
from tasks.serving.windows import REQUEST

LIMIT_S, RETRY_S, CLIENTS = 1800.0, 0.1, 12
# So many requests beyond the answers that a kill waits for are asked before the kill.
LEAD = CLIENTS // 2
MEMBERS = 2
SECRET = "not-secret-in-a-benchmark"  # noqa: S105
VICTIMS = (("server",), ("member",), ("server", "member"))
OVERDUE_S = 600.0
# Of the waits: members, seconds between two requests and of a step, and the longest response in tokens.
WAITED_MEMBERS, GAP_S, STEP_S, LONGEST = 4, 8.0, 0.4, 400


@dataclass
class Crew:
    """The processes of a served run: one server and MEMBERS members, each started again after a kill."""

    folder: Path
    port: int
    server: "subprocess.Popen[bytes] | None" = None
    members: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start_server(self) -> None:
        """Start the server; the port is the same in every life."""
        self.server = self._start("serve", str(self.folder / "config.json"), "--listen", str(self.port))

    def start_member(self) -> None:
        """Start one more member."""
        self.members.append(self._start("join", str(self.folder / "run"), "--time-limit-s", str(LIMIT_S)))

    def kill(self, victims: Sequence[str]) -> None:
        """Kill the server, the oldest member, or both, and start each again."""
        assert self.server is not None
        found = [self.server] * ("server" in victims) + self.members[:1] * ("member" in victims)
        for process in found:
            process.kill()
        for process in found:
            process.wait(LIMIT_S)
        if "server" in victims:
            self.start_server()
        if "member" in victims:
            del self.members[0]
            self.start_member()

    def end(self) -> None:
        """End all processes."""
        for process in filter(None, [self.server, *self.members]):
            process.terminate()
        for process in filter(None, [self.server, *self.members]):
            process.wait(LIMIT_S)

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        path = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        environment = os.environ | {"PYTHONPATH": ":".join(path), KEY_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gleaner", *arguments], cwd=self.folder, env=environment, stdout=log, stderr=log
            )


class Client:
    """Asks until it is answered, and counts how often it had to ask."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self.attempts = Counter[str]()

    def ask(self, key: str, body: Mapping[str, Any]) -> bytes:
        """The bytes of the answer; raises RuntimeError for a refusal, or without an answer after LIMIT_S."""
        headers = {"Authorization": f"Bearer {SECRET}", "Idempotency-Key": key, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)  # noqa: S310 - http
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            self.attempts[key] += 1
            try:
                with urllib.request.urlopen(request, timeout=OVERDUE_S) as answer:  # noqa: S310
                    found: bytes = answer.read()
                    return found
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise RuntimeError(f"{key}: {error.code} {error.read()!r}") from None
            except (OSError, ValueError, EOFError):
                pass  # the server was killed before, or while it answered
            except Exception as error:
                if type(error).__module__ != "http.client":
                    raise
            time.sleep(RETRY_S)
        raise RuntimeError(f"{key}: no answer after {LIMIT_S:.0f} s")


def document(url: Path, model: Path, engine: str, ahead: int = WINDOWS_AHEAD) -> dict[str, Any]:
    """The configuration of a served run; ahead: how many windows overlap with the oldest."""
    return {
        "run": {"url": str(url), "seed": 7, "num_prompts_per_step": CLIENTS, "num_generations": 2},
        "policy": {"path": str(model)},
        "data": {"source": "submitted"},
        "rewards": [],
        "algorithm": {"micro_batch_order": "arrival", "max_staleness": ahead},
        "sampling": {"max_completion_length": 48},
        "rollout": {"engine": engine, "flush_interval_s": 0.1, "claim_ttl_s": 3.0, "device": "cpu"},
        "trainer": {"placement": "external", "group_timeout_s": LIMIT_S},
        "pools": {"rollout": {"count": 1}},
    }


def bodies(number: int) -> dict[str, dict[str, Any]]:
    """The requests by their keys: text and token ids, one and several responses, long and short."""
    found = {}
    for k in range(number):
        prompt: Any = f"{k}+{k % 7}=" if k % 3 else [1, 31 + k % 9, 32 + k // 9 % 8, 40]
        body = {"prompt": prompt, "return_token_ids": True, "logprobs": 0, "n": 1 + k % 3}
        found[f"request-{k}"] = body | ({"max_tokens": 5} if k % 5 == 4 else {})
    return found


def disturbed(
    crew: Crew, asked: Mapping[str, Mapping[str, Any]], kills: int, seed: int
) -> tuple[dict[str, bytes], int]:
    """All answers, with processes killed in turn while the requests are answered; also the number of kills."""
    client, chance, answers = Client(crew.port), random.Random(seed), dict[str, bytes]()
    ended, done = threading.Event(), 0
    shares = [len(asked) * number / (kills + 1) for number in range(kills)]

    def kill() -> None:
        nonlocal done
        for number, share in enumerate(shares):
            while len(answers) < share and not ended.wait(0.02):
                pass
            if ended.wait(chance.uniform(0.0, 2.0)):
                return
            crew.kill(VICTIMS[number % len(VICTIMS)])
            done += 1

    def ask(numbered: tuple[int, str]) -> None:
        number, key = numbered
        # Fast answers would leave nothing to ask under the last kills.
        while done < sum(share + LEAD <= number for share in shares) and not ended.wait(0.02):
            pass
        try:
            answers[key] = client.ask(key, asked[key])
        except BaseException:
            ended.set()
            raise

    killer = threading.Thread(target=kill, name="killer")
    killer.start()
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(ask, enumerate(asked)))
    finally:
        ended.set()
        killer.join(LIMIT_S)
    return answers, done


def planned(url: Path) -> dict[int, list[prompt_table.PromptRow]]:
    """The prompts of each window, by iteration."""
    store, found = connect(str(url)), dict[int, list[prompt_table.PromptRow]]()
    while exists(store, layout.plan(len(found))):
        found[len(found)] = prompt_table.read_prompts(store, read_plan(store, len(found)))
    return found


def undisturbed(
    crew: Crew, config: Mapping[str, Any], windows: Mapping[int, list[prompt_table.PromptRow]]
) -> dict[str, list[list[int]]]:
    """The tokens of each request's responses in a run with the same windows and no kill."""
    found = dict[str, list[list[int]]]()
    crew.start_member()
    with Rollouts(parse(dict(config))) as rollouts:
        for step, rows in windows.items():
            given = [{PROMPT: row.prompt, TOKENS: list(row.token_ids), **row.columns} for row in rows]
            rollouts.submit(step, given)
            for group in sorted(rollouts.next(step), key=lambda group: group.number):
                responses = [response.token_ids.tolist() for response in group.responses]
                found.setdefault(group.columns[REQUEST], []).extend(responses)
            rollouts.publish(None)
    return found


def differences(
    answers: Mapping[str, bytes], asked: Mapping[str, Mapping[str, Any]], expected: Mapping[str, list[list[int]]]
) -> int:
    """How many answers have other tokens than those of the undisturbed run."""
    wrong = 0
    for key, body in asked.items():
        answer = json.loads(answers[key])
        name, longest = answer["id"].removeprefix("cmpl-"), body.get("max_tokens", 1 << 30)
        tokens = [choice["token_ids"] for choice in answer["choices"]]
        wrong += tokens != [each[:longest] for each in expected[name][: body["n"]]]
    return wrong


def free_port() -> int:
    """A port that was free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure(
    root: Path, model: Path, *, requests: int, kills: int, engine: str = "torch", seed: int = 1
) -> list[Target]:
    """Serve `requests` under `kills`, and the same windows without; root: an empty folder."""
    folders = [root / "disturbed", root / "undisturbed"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(document(folder / "run", model, engine)))
    crew, asked = Crew(folders[0], free_port()), bodies(requests)
    try:
        crew.start_server()
        for _ in range(MEMBERS):
            crew.start_member()
        answers, killed = disturbed(crew, asked, kills, seed)
        crew.kill(("server",))
        client = Client(crew.port)
        again = sum(client.ask(key, body) != answers[key] for key, body in asked.items())
    finally:
        crew.end()
    windows = planned(folders[0] / "run")
    of_requests = Counter(name for rows in windows.values() for name in {row.columns[REQUEST] for row in rows})
    alone = Crew(folders[1], 0)
    try:
        expected = undisturbed(alone, document(folders[1] / "run", model, engine), windows)
    finally:
        alone.end()
    return [
        Target("requests answered", float(len(answers)), f"== {requests}"),
        Target("kills", float(killed), f">= {kills}"),
        Target("answers that differ when asked again", float(again), "== 0"),
        Target("requests that are not in one iteration", float(sum(n != 1 for n in of_requests.values())), "== 0"),
        Target("requests of the run", float(len(of_requests)), f"== {requests}"),
        Target("answers unlike the undisturbed run's", float(differences(answers, asked, expected)), "== 0"),
    ]


def short_wait_s(folder: Path, model: Path, *, requests: int, gap_s: float, step_s: float, ahead: int) -> float:
    """As `beside_long`; folder: for the run, and made here."""
    settings = document(folder / "run", model, "scripted", ahead)
    settings["run"]["num_generations"] = 1
    settings["sampling"]["max_completion_length"] = LONGEST
    settings["rollout"]["scripted_step_s"] = step_s
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    crew = Crew(folder, free_port())
    client = Client(crew.port)

    def ask(number: int) -> tuple[int, float, float]:
        begun_s = time.monotonic()
        answer = json.loads(client.ask(f"wait-{number}", {"prompt": f"{number}+1=", "return_token_ids": True}))
        return answer["usage"]["completion_tokens"], begun_s, time.monotonic()

    try:
        crew.start_server()
        for _ in range(WAITED_MEMBERS):
            crew.start_member()
        for number in range(WAITED_MEMBERS):
            ask(-1 - number)  # until all have begun
        with ThreadPoolExecutor(requests) as pool:
            asked = []
            for number in range(requests):
                asked.append(pool.submit(ask, number))
                time.sleep(gap_s)
            return beside_long([each.result() for each in asked])
    finally:
        crew.end()


def beside_long(answered: Sequence[tuple[int, float, float]]) -> float:
    """The median seconds of requests of the shorter half that came while one of the longest quarter was unanswered.

    answered: the tokens of each answer, and the moments of the request and of the answer in seconds.
    """
    by_length = sorted(answered)
    long = by_length[-max(1, len(answered) // 4) :]
    beside = [
        answered_s - asked_s
        for _, asked_s, answered_s in by_length[: len(answered) // 2]
        if any(begun_s <= asked_s <= ended_s for _, begun_s, ended_s in long)
    ]
    return statistics.median(beside)


def measure_waits(
    root: Path, model: Path, *, requests: int, gap_s: float = GAP_S, step_s: float = STEP_S
) -> list[Target]:
    """The waits of short requests beside long ones; root: an existing folder."""
    overlapping, alone = (
        short_wait_s(root / f"ahead-{ahead}", model, requests=requests, gap_s=gap_s, step_s=step_s, ahead=ahead)
        for ahead in (WINDOWS_AHEAD, 0)
    )
    return [
        Target("median seconds of a short request beside a long one, windows overlap", overlapping, "> 0"),
        Target("the same, one window after another", alone, "> 0"),
        Target("share of the seconds of one after another", overlapping / alone, "<= 0.7"),
    ]


def main() -> None:
    """Serve, kill, compare, print the figures, and end with 1 if a target is missed."""
    from examples.warm_start import build_model, build_tokenizer  # noqa: PLC0415 - torch is imported here

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--waits", type=int, default=16, help="requests of which the waits are measured")
    given = options.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(root / "model")
        build_model(len(tokenizer)).save_pretrained(root / "model")
        targets = measure(root, root / "model", requests=given.requests, kills=given.kills)
        targets += measure_waits(root, root / "model", requests=given.waits)
    finish("serve", [], targets, as_json=given.json, results={"seconds": time.monotonic() - began_s})


if __name__ == "__main__":
    main()
