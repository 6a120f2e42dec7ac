"""A draft model of a run: refusals by `check` and by the plan, the run's copy, and members that draft with the copy."""

import json
import shutil

import pytest

from storage.journal.assembly import JournalReader
from storage.records import layout, model_copies, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.draft_totals import summed
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.store import ConflictingRecord
from tasks.configuration.run_config import parse
from tasks.preparing.checks import check_files
from tasks.preparing.engine_fit import EngineMisfit
from tasks.preparing.iteration import prepare
from tasks.sampling.session.draft_model import with_draft_model
from tests.small_run import EXECUTION, document, memory_store, model_directory, plan_iteration, roll_out
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

NAME = "drafting"
URL = f"memory://{NAME}"
FIELD = "rollout.speculation.draft_model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def draft(tmp_path, model):
    """The policy's own model, in another directory."""
    return shutil.copytree(model, tmp_path / "draft")


def config(model, draft, *, drafts=4, **rollout):
    speculation = {"drafts": drafts, "source": "draft_model", "draft_model": str(draft)}
    return parse(document(URL, model, rollout={"engine": "torch", "speculation": speculation, **rollout}))


def refusals(settings):
    """What `check` and `plan` say; neither writes anything."""
    lines = []
    for look in (check_files, lambda given: prepare(given, EXECUTION, None)):
        memory_store(NAME)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is compared by the caller
            look(settings)
        lines.append(str(caught.value))
        assert connect(URL).list("") == []
    return lines


def test_a_model_that_cannot_draft_is_refused_by_a_line_that_names_the_field(tmp_path, model, draft):
    for line in refusals(config(model, "/nowhere")):
        assert f"{FIELD}: '/nowhere' does not exist" in line
    short = save_tiny_model(tmp_path / "short", tiny_model(tiny_config(max_position_embeddings=40)))
    for line in refusals(config(model, short)):
        assert f"{FIELD}: {str(short)!r} reads at most 40 tokens; allowed: at least 256" in line
    fewer = save_tiny_model(tmp_path / "fewer", tiny_model(tiny_config(vocab_size=90)))
    for line in refusals(config(model, fewer)):
        assert (
            f"{FIELD}: {str(fewer)!r} has vocab_size 90; allowed: more than the largest id of its tokenizer (95)"
            in line
        )
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    for line in refusals(config(model, draft)):
        assert f"{FIELD}: the tokenizer of {str(draft)!r} is not that of policy.path ({str(model)!r})" in line


def test_its_memory_counts_beside_the_policys(tmp_path, model, draft, caplog):
    """A row takes 33 kB of an L4's 24 GB, and as much again for a draft model of the same size."""
    rollout = {"engine": "torch", "device": "auto", "max_responses_in_flight": 400_000}
    pools = {"rollout": {"machine": "g6.xlarge", "gpus": 1, "accelerator": "nvidia-l4", "count": 1}}
    speculation = {"drafts": 4, "source": "draft_model", "draft_model": str(draft)}
    given = parse(document(URL, model, rollout=rollout | {"speculation": speculation}, pools=pools))
    for line in refusals(given):
        assert "pools.rollout: the torch engine needs 26.2 GB of cache" in line
        assert f"both with the draft model's ({FIELD})" in line
    # A run that drafts already goes on: its responses may never be as long, all at once.
    memory_store(NAME)
    plan_iteration(config(model, draft))
    with caplog.at_level("WARNING"):
        plan_iteration(given)
    assert "not sure: pools.rollout: the torch engine needs 26.2 GB of cache" in caplog.text
    another = {"draft_model": str(shutil.copytree(draft, tmp_path / "another"))}
    with pytest.raises(EngineMisfit, match=r"the torch engine needs 26\.2 GB of cache"):
        plan_iteration(
            parse(document(URL, model, rollout=rollout | {"speculation": speculation | another}, pools=pools))
        )


def test_vllm_takes_no_model_with_more_tokens_than_the_policy(tmp_path, model):
    more = save_tiny_model(tmp_path / "more", tiny_model(tiny_config(vocab_size=128)))
    memory_store(NAME)
    assert f"draft model: {more}" in "\n".join(check_files(config(model, more)))
    with pytest.raises(
        Exception, match=r"vocab_size 128; allowed with rollout.engine 'vllm': that of policy.path \(96\)"
    ):
        check_files(config(model, more, engine="vllm"))


def test_without_drafts_nothing_is_looked_at_or_copied(model):
    settings = config(model, "/nowhere", drafts=0)
    store = memory_store(NAME)
    assert "draft model" not in "\n".join(check_files(settings))
    plan_iteration(settings)
    assert store.list(layout.REWARD_MODELS) == []
    with with_draft_model(store, settings.rollout) as found:
        assert found == settings.rollout


def test_a_run_holds_its_draft_model_and_takes_another_from_the_next_execution_on(tmp_path, model, draft):
    settings, store = config(model, draft), memory_store(NAME)
    plan_iteration(settings)
    held = settings.rollout.speculation.model_copy
    assert model_copies.stored(store, held) == model_copies.describe(draft)
    files = {file.name: file.read_bytes() for file in draft.iterdir()}
    (draft / "model.safetensors").write_bytes(b"another")
    with pytest.raises(
        ConflictingRecord, match=rf"{FIELD}: .* holds another model than the run's copy; allowed: the same"
    ):
        plan_iteration(settings)
    shutil.rmtree(draft)
    plan_iteration(settings)
    other = save_tiny_model(tmp_path / "other", tiny_model(tiny_config(), seed=4))
    second = config(model, other)
    with with_draft_model(store, second.rollout) as found:
        assert found.speculation.drafts == 0, "not copied yet, so the member decodes without"
    plan_iteration(second)
    for given, wanted in ((settings, files["model.safetensors"]), (second, (other / "model.safetensors").read_bytes())):
        with with_draft_model(store, given.rollout) as found:
            folder = found.speculation.draft_model
            assert found.speculation.revision is None
            with open(f"{folder}/model.safetensors", "rb") as file:  # noqa: PTH123 - by the name that engines get
                assert file.read() == wanted


@pytest.mark.slow
def test_members_draft_with_the_runs_copy_and_decode_what_they_decode_without(model, draft):
    found = {}
    for drafts in (0, 4):
        store = memory_store(NAME)
        plan_iteration(config(model, draft, drafts=drafts, device="cpu"))
        if drafts:
            shutil.rmtree(draft)
        roll_out(URL, 0)
        plan = read_plan(store, 0)
        reader = JournalReader(store, plan)
        reader.refresh()
        found[drafts] = [reader.assemble(response).token_ids.tolist() for response in range(plan.num_responses)]
        beats = [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(0))]
        totals = [beat.drafts for beat in beats if beat.drafts is not None]
        assert bool(totals) == bool(drafts)
    assert found[0] == found[4]
    assert all(found[0])
    counts = summed(totals)
    assert counts.accepted == counts.drafted > 100, "the policy is its own draft model, with the same noise"
