"""Tinker's own client, and the rollouts of tinker-cookbook, with kills of the server and of a member.

python -m pytest -m peers tests/tasks/serving/test_tinker_itself.py
"""

import asyncio
import gc
import json
import time
from contextlib import contextmanager
from importlib import import_module
from threading import Thread

import pytest

from benchmarks.serve import SECRET, Crew, document, free_port, planned, undisturbed
from examples.warm_start import build_model, build_tokenizer
from tasks.serving.windows import REQUEST

# The client warns of its own older forms, and leaves connections open.
pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
]
NEEDS = "needs tinker 0.38 and tinker-cookbook 0.6.1"
LIMIT_S = 600.0
STOP = 2  # the tokenizer's <eos>


@pytest.fixture
def tinker():
    pytest.importorskip("tinker_cookbook", reason=NEEDS)
    return pytest.importorskip("tinker", reason=NEEDS)


def cookbook(name):
    return import_module(f"tinker_cookbook.{name}")


@contextmanager
def sampling_client(tinker, folder):
    """A sampling client of Tinker at a served run with two members, and the run's processes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(document(folder / "run", folder.parent / "model", "torch")))
    crew = Crew(folder, free_port())
    try:
        crew.start_server()
        for _ in range(2):
            crew.start_member()
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{crew.port}", api_key=f"tml-{SECRET}")
        yield service.create_sampling_client(base_model="policy").result(LIMIT_S), crew
        service.close("success").result(LIMIT_S)
    finally:
        crew.end()
        # The client leaves some of its connections to the garbage collector.
        gc.collect()


@contextmanager
def killed(crew, *deaths):
    """Kill the victims of each death when the run has so many objects of a kind, and start each again."""

    def kill():
        for pattern, number, victims in deaths:
            until_s = time.monotonic() + LIMIT_S
            while len(list((crew.folder / "run").glob(pattern))) < number:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            crew.kill(victims)

    thread = Thread(target=kill)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def expected_tokens(tmp_path, crew):
    """The tokens of each sequence by its id, from a run with the same windows and no kill."""
    windows = planned(crew.folder / "run")
    alone = tmp_path / "undisturbed"
    alone.mkdir()
    config = document(alone / "run", tmp_path / "model", "torch")
    (alone / "config.json").write_text(json.dumps(config))
    other = Crew(alone, 0)
    try:
        found = undisturbed(other, config, windows)
    finally:
        other.end()
    named = [row.columns[REQUEST] for rows in windows.values() for row in rows]
    assert set(named) == set(found)
    return {f"{name}:{sample}": ids for name, all_ids in found.items() for sample, ids in enumerate(all_ids)}


@pytest.fixture
def tokenizer(tmp_path):
    found = build_tokenizer()
    found.save_pretrained(tmp_path / "model")
    build_model(len(found)).save_pretrained(tmp_path / "model")
    return found


def test_futures_of_a_killed_server_resolve_to_the_tokens_of_an_undisturbed_one(tinker, tmp_path, tokenizer):
    with sampling_client(tinker, tmp_path / "disturbed") as (client, crew):
        prompts = [tinker.ModelInput.from_ints(tokenizer(f"{k}+{k}=")["input_ids"]) for k in range(8)]
        params = [tinker.SamplingParams(max_tokens=5 + 8 * k, stop=[STOP] if k % 2 else None) for k in range(5)]

        async def asynchronously():
            return await asyncio.gather(
                *(client.sample_async(prompt, 1, params[k]) for k, prompt in enumerate(prompts[5:]))
            )

        futures = [client.sample(prompt, 1 + k % 3, params[k]) for k, prompt in enumerate(prompts[:5])]
        with killed(crew, ("requests/*", 5, ("server",)), ("*/*/journal/*/*", 1, ("server", "member"))):
            later = asyncio.run(asynchronously())
            answers = [future.result(timeout=LIMIT_S) for future in futures] + later
    expected = expected_tokens(tmp_path, crew)
    asked = [params[k] for k in range(5)] + params[:3]
    assert [len(answer.sequences) for answer in answers] == [1, 2, 3, 1, 2, 1, 1, 1]
    for answer, given in zip(answers, asked, strict=True):
        for sequence in answer.sequences:
            assert sequence.tokens == expected[sequence.sequence_id][: given.max_tokens]
            assert sequence.stop_reason == ("stop" if sequence.tokens[-1] == STOP else "length")
            assert len(sequence.logprobs) == len(sequence.tokens)
            assert max(sequence.logprobs) < 0


def test_what_is_not_served_ends_the_client_s_call_at_once(tinker, tmp_path, tokenizer):
    with sampling_client(tinker, tmp_path / "disturbed") as (client, _):
        prompt = tinker.ModelInput.from_ints(tokenizer("1+1=")["input_ids"])
        service = tinker.ServiceClient(base_url=client.holder.shadow_config.base_url, api_key=f"tml-{SECRET}")
        refusals = {
            "seed: value 3": lambda: client.sample(prompt, 1, tinker.SamplingParams(seed=3)),
            "stop: value": lambda: client.sample(prompt, 1, tinker.SamplingParams(stop=["\n\nUser:"])),
            "prompt_logprobs: value True": lambda: client.compute_logprobs(prompt),
            "create_model: not served": lambda: service.create_lora_training_client_async("policy"),
            "base_model: value 'x'": lambda: service.create_sampling_client_async(base_model="x"),
            "model_path: value": lambda: service.create_sampling_client_async(model_path="tinker://a/b"),
        }

        async def awaited(call):
            return await call()

        for message, call in refusals.items():
            began_s = time.monotonic()
            with pytest.raises(tinker.APIStatusError, match=message):
                asyncio.run(awaited(call))
            assert time.monotonic() - began_s < 20
        service.close("success").result(LIMIT_S)


def problem_groups(tinker, tokenizer, number, size):
    """Groups of a cookbook's ProblemEnv: sums, whose answer is right if it has as many characters as it should."""
    rendering, problems = cookbook("renderers.role_colon"), cookbook("rl.problem_env")

    class Plain(rendering.RoleColonRenderer):
        """The question alone, and the run's own stop token."""

        def build_generation_prompt(self, messages, role="assistant", prefill=None):
            return tinker.ModelInput.from_ints(self.tokenizer(messages[-1]["content"])["input_ids"])

        def get_stop_sequences(self):
            return [self.tokenizer.eos_token_id]

    class Sums(problems.ProblemEnv):
        def __init__(self, k):
            super().__init__(Plain(tokenizer), require_stop_sequence_for_format=False)
            self.k = k

        def get_question(self):
            return f"{self.k}+{self.k}="

        def check_answer(self, sample_str):
            return len(sample_str) % 2 == 0

        def check_format(self, sample_str):
            return bool(sample_str)

        def get_reference_answer(self):
            return str(2 * self.k)

    return [problems.ProblemGroupBuilder(lambda k=k: Sums(k), size) for k in range(number)]


def test_the_cookbook_s_group_rollouts_are_those_of_an_undisturbed_server(tinker, tmp_path, tokenizer):
    with sampling_client(tinker, tmp_path / "disturbed") as (client, crew):
        policy = cookbook("completers").TinkerTokenCompleter(client, max_tokens=40)

        async def rollouts():
            do_group_rollout = cookbook("rl.rollouts").do_group_rollout
            builders = problem_groups(tinker, tokenizer, 3, 4)
            return await asyncio.gather(*(do_group_rollout(builder, policy) for builder in builders))

        with killed(crew, ("requests/*", 12, ("server",))):
            groups = asyncio.run(rollouts())
    expected = expected_tokens(tmp_path, crew)
    assert [len(group.trajectories_G) for group in groups] == [4, 4, 4]
    for group in groups:
        for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
            [turn] = trajectory.transitions
            assert turn.ac.tokens == expected[turn.ac.sequence_id][:40]
            text = tokenizer.decode([token for token in turn.ac.tokens if token != STOP])
            ended = turn.ac.tokens[-1] == STOP and bool(text)
            assert reward == pytest.approx(0.1 * (ended - 1) + (len(text) % 2 == 0))
