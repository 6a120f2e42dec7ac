"""A plan with tools: what is rendered and stored, what is reset, and what is refused before anything is created."""

import json
from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.journal.noise_keys import group_seed
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan
from tasks.preparing.checks import check_files, check_settings
from tasks.preparing.iteration import prepare
from tasks.preparing.tools import openings, prompt_tokenizer
from tasks.prompts.prompt import Prompt, PromptError
from tasks.turns.opened_environments import opened_environments
from tasks.turns.reading import message_reader
from tasks.turns.tool_schemas import ToolsUnusable, name_of
from tests.character_turns import said as a_turn
from tests.chat_tokenizers import FORGETFUL, QWEN, chat_tokenizer
from tests.small_run import config, everything, memory_store
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

MODULE = "tests.tasks.turns.environments_for_plan"
URL = "memory://tools"
SCHEMAS_TOKENS = 2000  # the tokenizer has one for each character or two


def model_with(folder, template):
    tokenizer = chat_tokenizer(template)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fields = {"vocab_size": 400, "eos_token_id": stop, "max_position_embeddings": SCHEMAS_TOKENS, "hidden_size": 32}
    save_tiny_model(folder, tiny_model(tiny_config(**fields)))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("with_tools"), QWEN)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "mazes.jsonl"
    mazes = [{"prompt": [{"role": "user", "content": f"Leave maze {k}."}], "size": k} for k in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in mazes))
    return path


@pytest.fixture
def store():
    return memory_store("tools")


def settings(model_dir, rows, turns, **sections):
    return config(
        URL,
        model_dir,
        data={"source": str(rows), "shuffle": False},
        rewards=[{"function": "length", "arguments": {"free_tokens": 1, "scale_tokens": 1}}],
        turns=turns,
        **sections,
    )


def prompts_of(store):
    return read_prompts(store, read_plan(store, 0))


def test_a_plan_tells_of_the_tools_and_stores_what_each_group_was_opened_with(store, model_dir, rows):
    chosen = settings(model_dir, rows, {"tools": [f"{MODULE}:look"], "environment": f"{MODULE}:Maze"})
    prepare(chosen, "e1", ManualClock())
    stored = prompts_of(store)
    seeds = [group_seed(3, 0, group) for group in range(4)]
    told = [f" The maze has {k} rooms and the seed {seeds[k]}; 1 messages." if k else None for k in range(4)]
    assert [row.opening for row in stored] == told
    assert [row.prompt[0]["content"] for row in stored] == [f"Leave maze {k}.{told[k] or ''}" for k in range(4)]
    tokenizer = chat_tokenizer(QWEN)
    for row in stored:
        text = tokenizer.decode(row.token_ids)
        assert text.index('"name": "look"') < text.index('"name": "go"')
        assert text.endswith(f"{row.prompt[0]['content']}<|im_end|>\n<|im_start|>assistant\n")


def test_members_and_trainers_speak_the_plan_s_tools_whatever_their_code_says(store, model_dir, rows, monkeypatch):
    chosen = settings(model_dir, rows, {"tools": [f"{MODULE}:look"], "environment": f"{MODULE}:Maze"})
    prepare(chosen, "e1", ManualClock())
    plan = read_plan(store, 0)
    assert [name_of(schema) for schema in plan.tools] == ["look", "go"]

    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("the tools' code is not asked what it offers")

    monkeypatch.setattr("tasks.turns.opened_environments.with_processes", no_process)
    changed = replace(plan, tools=({**plan.tools[0], "function": {**plan.tools[0]["function"], "name": "peek"}},))
    said = chat_tokenizer(QWEN)('<tool_call>\n{"name": "peek", "arguments": {}}\n</tool_call><|im_end|>')["input_ids"]
    # A member may live longer than one execution, between which tools may change.
    with opened_environments(chosen.turns, store, plan, model_dir) as environments:
        for told in (plan, changed, plan):
            turn = replace(a_turn(""), tools=told.tools)
            [call] = environments._language._codec(turn).read(said).calls
            assert (call.problem or "").startswith("there is no tool 'peek'") is (told is plan)
    read = message_reader(chosen.turns, changed, model_dir)
    _, messages = read(prompts_of(store)[0], said, (len(said),), ())
    assert [call["function"]["name"] for call in messages[0]["tool_calls"]] == ["peek"]


def test_a_plan_without_turns_names_no_tools(store, model_dir, rows):
    prepare(settings(model_dir, rows, None), "e1", ManualClock())
    assert read_plan(store, 0).tools == ()
    assert b'"tools"' not in store.get(layout.plan(0))


def test_tools_alone_open_nothing(store, model_dir, rows):
    prepare(settings(model_dir, rows, {"tools": [f"{MODULE}:look"]}), "e1", ManualClock())
    assert [row.opening for row in prompts_of(store)] == [None] * 4
    assert '"name": "look"' in chat_tokenizer(QWEN).decode(prompts_of(store)[0].token_ids)


def test_each_group_is_reset_once_with_its_row_and_its_seed(model_dir, rows):
    asked = []

    def resets(turns, columns, seeds):
        asked.extend(zip(columns, seeds, strict=True))
        return ["!"] * len(seeds)

    chosen = settings(model_dir, rows, {"environment": f"{MODULE}:Maze"})
    prompts = [Prompt(str(k), [{"role": "user", "content": "x"}], {"size": k}) for k in range(3)]
    assert openings(chosen, prompts, 3, 5, resets) == ["!"] * 3
    messages = [{"role": "user", "content": "x"}]
    assert asked == [({"prompt": messages, "size": k}, group_seed(3, 5, k)) for k in range(3)]
    assert openings(replace(chosen, turns=None), prompts, 3, 5, resets) == []


def refused(store, settings, kind, match):
    with pytest.raises(kind, match=match) as raised:
        prepare(settings, "e1", ManualClock())
    assert "\n" not in str(raised.value)
    assert everything(store) == {}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ({"tools": ["no_such_module:look"]}, r"^turns\.tools: 'no_such_module:look' cannot be loaded: ModuleNotFound"),
        ({"environment": f"{MODULE}:Untold"}, "^tool 'go': no schema can be made from its types and its docstring: "),
        ({"environment": f"{MODULE}:Broken"}, r"^turns\.environment: .*cannot be reset: .*OSError: no server"),
        ({"environment": f"{MODULE}:Maze", "side_effects": ["fly"]}, r"^turns\.side_effects: value 'fly'; allowed: "),
    ],
)
def test_tools_that_cannot_be_used_are_refused(store, model_dir, rows, turns, message):
    refused(store, settings(model_dir, rows, turns), ToolsUnusable, message)


def test_a_template_that_does_not_preserve_prefixes_is_refused(store, rows, tmp_path):
    folder = model_with(tmp_path / "model", FORGETFUL)
    turns = {"tools": [f"{MODULE}:look"]}
    refused(store, settings(folder, rows, turns), PromptError, r"^policy\.path: the chat template does not preserve")


def test_a_prompt_that_is_text_is_refused_by_its_name(store, model_dir, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"prompt": "Leave the maze."}\n')
    chosen = settings(model_dir, tmp_path / "text.jsonl", {"tools": [f"{MODULE}:look"]})
    refused(store, chosen, PromptError, "^prompt '0': it is text of 15 characters; allowed with turns: chat messages$")


def test_the_generator_of_text_is_refused_without_opening_anything(model_dir):
    chosen = config(URL, model_dir, turns={"tools": ["m:f"]})
    with pytest.raises(
        ValueError, match=r"^data\.source: value 'arithmetic', whose prompts are text; allowed with tur"
    ):
        check_settings(chosen)


def test_a_check_of_files_loads_the_tools_and_resets_one_group(model_dir, rows):
    chosen = settings(model_dir, rows, {"environment": f"{MODULE}:Maze"})
    seen = check_files(chosen)
    assert [line for line in seen if line.startswith("turns: ")] == [
        f"turns: the tools and their schemas, the chat template with tools, and a reset of {MODULE}:Maze"
    ]


def test_a_check_of_files_opens_the_first_prompt(model_dir, rows):
    chosen = settings(model_dir, rows, {"environment": f"{MODULE}:Walled"})
    with pytest.raises(ToolsUnusable, match="a maze without a room"):
        check_files(chosen)


def test_without_turns_prompts_are_rendered_by_the_tokenizer_itself(model_dir, rows):
    chosen = settings(model_dir, rows, None)
    ids = prompt_tokenizer(chosen, model_dir).apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert "look" not in chat_tokenizer(QWEN).decode(ids)
