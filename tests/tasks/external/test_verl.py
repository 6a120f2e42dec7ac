"""verl's side of the contract, by a program that calls what RayPPOTrainer calls, in its order."""

import hashlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gleaner
from tasks.external.rollouts import Rollouts
from tasks.external.verl import AgentLoopManager, CheckpointEngineManager, VerlMisfit
from tests.external_program import arrays, process_dies, settings, versions
from tests.small_run import memory_store, roll_out

STEPS, WIDTH, LENGTH = 2, 16, 40
PROMPTS = [["1+1=", "2+2="], ["3+3=", "4+4="]]
GIVEN = {"data": {"source": "submitted"}, "retention": {"keep_weights": 9}}


@pytest.fixture(scope="module")
def model(tmp_path_factory, model):
    """The tiny model with a chat template, because verl's prompts are messages."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


class Rolled(Rollouts):
    """Rollouts whose members have generated before the groups are asked for."""

    def next(self, step):
        groups = super().next(step)
        roll_out(self.url, step)
        return groups


class Section(dict):
    """A section of verl's configuration."""

    __getattr__ = dict.__getitem__


def verl_config(folder, rollout=(), **trainer):
    given = {"n": 3, "prompt_length": WIDTH, "response_length": LENGTH, "temperature": 1.0, "custom": None}
    trained = {"save_freq": 1, "critic_warmup": 0, "default_local_dir": str(folder)}
    part = Section(rollout=Section(given | dict(rollout)))
    return Section(actor_rollout_ref=part, trainer=Section(trained | trainer))


class Batch(SimpleNamespace):
    """What the adapter uses of verl's DataProto."""

    @classmethod
    def from_dict(cls, tensors, non_tensors, meta_info):
        return cls(batch=tensors, non_tensor_batch=non_tensors, meta_info=meta_info)


def batch(step, **meta):
    """The batch of verl's step, which verl counts from 1."""
    texts = [text for text in PROMPTS[step - 1] for _ in range(3)]
    objects = np.empty(len(texts), dtype=object)
    objects[:] = [[{"role": "user", "content": text}] for text in texts]
    truths = np.array([{"ground_truth": text[0], "style": "rule"} for text in texts], dtype=object)
    rows = {"raw_prompt": objects, "uid": np.array(texts, dtype=object), "reward_model": truths}
    return Batch(non_tensor_batch=rows, meta_info={"global_steps": step} | meta)


def new_run(name, model, folder):
    memory_store(name)
    return settings(f"memory://{name}", model, **GIVEN), folder / name


def saved(folder, step, weights):
    """verl's checkpoint of a step."""
    place = folder / f"global_step_{step}" / "actor" / "huggingface"
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.tensor(array) for name, array in weights.items()}, place / "model.safetensors")


def life(given, folder, seen):
    """Train from verl's last checkpoint; yields wherever the process may die."""
    manager = AgentLoopManager(verl_config(folder), Rolled(given))
    engine = CheckpointEngineManager(None, None, [])
    done = max((int(each.name.rpartition("_")[2]) for each in folder.glob("global_step_*")), default=0)
    engine.update_weights(done)
    yield
    for step in range(done + 1, STEPS + 1):
        out = manager.generate_sequences(batch(step))
        found = {name: tensor.tolist() for name, tensor in out.batch.items()}
        assert seen.setdefault(step, found) == found
        yield
        number = int(hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:8], 16) % 97 - 48
        base = arrays(given.run.url, step - 1)
        saved(folder, step, {name: array + np.float32(number * 1e-4) for name, array in base.items()})
        yield
        engine.update_weights(step)
        yield
    manager.close()


def test_a_batch_has_the_responses_in_its_order_padded_as_verl_pads(tmp_path, model):
    given, folder = new_run("verl", model, tmp_path)
    seen = {}
    for _ in life(given, folder, seen):
        pass
    run = gleaner.open(given.run.url)
    assert list(run.iterations) == [0, 1]
    assert len(versions(given.run.url)) == STEPS + 1
    table = sorted(run.responses(1).to_pylist(), key=lambda row: row["response"])
    found = seen[2]
    for at, row in enumerate(table):
        count = len(row["token_ids"])
        before = sum(found["attention_mask"][at][:WIDTH])
        tail = [0] * (LENGTH - count)
        assert found["responses"][at] == row["token_ids"] + tail
        assert found["response_mask"][at] == [1] * count + tail
        assert found["rollout_log_probs"][at] == row["logprobs"] + tail
        assert found["rm_scores"][at] == pytest.approx([0.0] * (count - 1) + [row["reward"]] + tail)
        assert found["attention_mask"][at] == [0] * (WIDTH - before) + [1] * (before + count) + tail
        assert found["position_ids"][at][WIDTH - before : WIDTH + count] == list(range(before + count))
        assert found["input_ids"][at] == found["prompts"][at] + found["responses"][at]


def test_a_verl_that_dies_anywhere_gets_the_same_batches_and_publishes_the_same(tmp_path, model):
    given, folder = new_run("verl-undisturbed", model, tmp_path)
    expected = {}
    points = sum(1 for _ in life(given, folder, expected))
    published = versions(given.run.url)
    assert points == 1 + 3 * STEPS
    for point in range(points):
        other, place = new_run(f"verl-{point}", model, tmp_path)
        seen = {}
        dying = life(other, place, seen)
        for _ in range(point + 1):
            next(dying)
        process_dies()
        for _ in life(other, place, seen):
            pass
        assert seen == expected, f"died at {point}"
        assert versions(other.run.url) == published, f"died at {point}"


def test_versions_stand_beside_each_response(tmp_path, model):
    given, folder = new_run("verl-versions", model, tmp_path)
    manager = AgentLoopManager(verl_config(folder), Rolled(given))
    out = manager.generate_sequences(batch(1))
    saved(folder, 1, arrays(given.run.url, 0))
    assert CheckpointEngineManager(None, None, []).update_weights(1) == {}
    later = manager.generate_sequences(batch(2))
    manager.close()
    for name in ("min_global_steps", "max_global_steps"):
        assert [*out.non_tensor_batch[name], *later.non_tensor_batch[name]] == [0] * 6 + [1] * 6
    assert set(out.non_tensor_batch["__num_turns__"]) == {2}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rollout": {"n": 4}}, r"rollout\.n: value 4 in verl's configuration; allowed with run\.num_generations: 3"),
        ({"rollout": {"temperature": 0.5}}, r"rollout\.temperature: value 0\.5"),
        ({"rollout": {"top_k": 20, "top_p": 1}}, r"rollout\.top_k: value 20 .* allowed with sampling\.top_k: 0"),
        ({"rollout": {"top_k": -1, "top_p": 0.9}}, r"rollout\.top_p: value 0\.9 .* allowed with sampling\.top_p: 1"),
        ({"save_freq": 10}, r"trainer\.save_freq: value 10 in verl's configuration; allowed with this manager: 1"),
        ({"critic_warmup": 2}, r"trainer\.critic_warmup: value 2"),
    ],
)
def test_a_setting_of_verl_that_cannot_be_is_refused_in_one_line(tmp_path, model, changes, line):
    with pytest.raises(VerlMisfit, match=line):
        AgentLoopManager(verl_config(tmp_path, **changes), Rollouts(settings("memory://verl-refused", model, **GIVEN)))


def test_what_verl_asks_for_and_no_run_has_is_refused_in_one_line(tmp_path, model, monkeypatch):
    given, folder = new_run("verl-asked", model, tmp_path)
    manager = AgentLoopManager(verl_config(folder), Rolled(given))
    with pytest.raises(VerlMisfit, match=r"trainer\.test_freq.* allowed: -1"):
        manager.generate_sequences(batch(1, validate=True))
    torn = batch(1)
    torn.non_tensor_batch["uid"][1] = "other"
    with pytest.raises(VerlMisfit, match="uid: a batch of 6 rows; allowed: each prompt 3 times"):
        manager.generate_sequences(torn)
    manager.generate_sequences(batch(1))
    with pytest.raises(VerlMisfit, match=r"trainer\.save_freq: no weights in .*global_step_1"):
        manager.generate_sequences(batch(2))
    manager.close()
    monkeypatch.setattr(AgentLoopManager, "latest", None)
    with pytest.raises(VerlMisfit, match="agent_loop_manager_class: another class"):
        CheckpointEngineManager(None, None, []).update_weights(1)
    with pytest.raises(VerlMisfit, match=r"rollout\.custom\.gleaner: not given"):
        AgentLoopManager.create(config=verl_config(folder))
