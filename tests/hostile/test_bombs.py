"""Small files and objects that would take the machine's memory or minutes: each is refused at once, in one line.

To add a case, add a text to DOCUMENTS, a reader to READERS, or a table to TABLES.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pyarrow as pa
import pytest

from resources.documents import BYTES_MAX, parse_json, parse_yaml
from resources.prices import PricesError, price_table
from storage.journal.compaction import read_responses
from storage.records import layout
from storage.records.canonical import wrap
from storage.records.framing import append_trailer
from storage.records.prompt_table import PromptRow, decode_prompts, encode_prompts, schema
from storage.records.records import RESPONSES_MAX
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.configuration.run_config import ConfigError, load
from tasks.forecasting.scenario import ScenarioError
from tasks.forecasting.scenario import load as load_scenario
from tasks.learning.pretrained import ModelError, check_model
from tests.committed_runs import committed_iteration
from tests.journals import a_plan

SECONDS_MAX = 20.0  # a busy machine takes a tenth of it
LEVELS = "abcdefghij"


def anchors(line: str, first: str) -> str:
    """Nine levels, each of nine aliases of the level before."""
    lines = [f"a: &a {first}"]
    lines += [line.format(name=name, before=before) for before, name in pairwise(LEVELS)]
    return "\n".join(lines)


DOCUMENTS = {
    "anchors in lists": anchors("{name}: &{name} [" + ", ".join(["*{before}"] * 9) + "]", "[x, x, x]"),
    "anchors in mappings": anchors(
        "{name}: &{name} {{" + ", ".join(f"{n}: *{{before}}" for n in range(9)) + "}}", "{x: 1}"
    ),
    "merged anchors": anchors("{name}: &{name} {{<<: [" + ", ".join(["*{before}"] * 9) + "]}}", "{x: 1, y: 2}"),
    "a chain of anchors": "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000)),
    "an anchor in itself": "a: &a [*a]",
    "a comment": "# " + "x" * BYTES_MAX,
    "blanks": " " * (BYTES_MAX + 1),
    "deep lists": "a: " + "[" * 500 + "]" * 500,
    "deep mappings": '{"a":' * 500 + "1" + "}" * 500,
    "deep and never closed": "[" * 500_000,
    "deep blocks": "- " * 500 + "x",
    "many values": "a: [" + "0," * 200_000 + "]",
    "many keys": "\n".join(f"k{n}: 0" for n in range(60_000)),
    "a long number": "a: " + "9" * 5000,
}

READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "config.yaml": (load, ConfigError),
    "scenario.yaml": (load_scenario, ScenarioError),
    "prices.yaml": (price_table, PricesError),
    "prices.json": (price_table, PricesError),
}


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("name", READERS)
def test_a_document_is_refused_at_once(tmp_path: Path, name: str, document: str):
    read, kind = READERS[name]
    file = tmp_path / name
    file.write_text(DOCUMENTS[document])
    began_s = perf_counter()
    with pytest.raises(kind) as caught:
        read(file)
    assert perf_counter() - began_s < SECONDS_MAX
    assert len(str(caught.value).splitlines()) <= 2  # a title, and the problem
    assert len(str(caught.value)) < 1000


def test_anchors_and_depth_within_reason_are_read():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}") == {"a": {"x": 1}, "b": {"x": 1, "y": [{"x": 1}] * 2}}
    deep = "[" * 50 + "]" * 50
    assert parse_yaml(deep) == parse_json(deep) == json.loads(deep)
    for parse in (parse_yaml, parse_json):
        with pytest.raises(ValueError, match="nested more than 50 levels deep"):
            parse(f"[{deep}]")


@pytest.mark.parametrize("text", ["[" * 500 + "]" * 500, "[" * 500_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_deep_model_configuration_is_refused(tmp_path: Path, name: str, text: str):
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "eos_token_id": 2}')
    (tmp_path / name).write_text(f'{{"vocab_size": 9, "x": {text}}}')
    with pytest.raises(ModelError, match=rf"{name} is not (JSON: nested more than 50 levels|an index)"):
        check_model(tmp_path)


@pytest.mark.parametrize("generations", [10**9, RESPONSES_MAX, 0, -1, 2**62])
def test_a_plan_of_too_many_responses_is_refused(generations: int):
    store = MemoryStore()
    committed_iteration(store, 0)
    key = layout.plan(0)
    body = json.dumps(asdict(a_plan(2, 2)) | {"num_generations": generations}).encode()
    store.put(key, wrap(key, "plan", body))
    with pytest.raises(CorruptObject, match=f"num_generations: value {generations} with 2 groups; allowed: 1 to"):
        list(read_responses(store, 0))


@pytest.mark.parametrize("generations", [RESPONSES_MAX, 10**9])
def test_a_configuration_of_too_many_responses_is_refused(tmp_path: Path, generations: int):
    run = {"url": "r", "num_prompts_per_step": 2, "num_generations": generations}
    whole = {"run": run, "policy": {"path": "p"}, "data": {"source": "arithmetic"}, "rewards": [{"function": "a:b"}]}
    (tmp_path / "run.yaml").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=r"run\.num_generations: value .* responses in an iteration; allowed: "):
        load(tmp_path / "run.yaml")


def compressed(columns: dict[str, list[object]]) -> bytes:
    table = pa.Table.from_pydict(columns, schema=schema())
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=9))
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return append_trailer(sink.getvalue().to_pybytes())


TABLES: dict[str, dict[str, list[object]]] = {
    "one long prompt": {
        "prompt_id": ["a"],
        "token_ids": [[1]],
        "prompt": ['"' + "a" * (65 << 20) + '"'],
        "columns": ["{}"],
        "opening": [None],
    },
    "many equal prompts": {
        "prompt_id": ["a"] * 70_000,
        "token_ids": [[1]] * 70_000,
        "prompt": ['"' + "a" * 1000 + '"'] * 70_000,
        "columns": ["{}"] * 70_000,
        "opening": [None] * 70_000,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_unpacks_to_much_is_refused_before_it_is_unpacked(name: str):
    body = compressed(TABLES[name])
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptObject, match=rf"'a-key' is corrupt: its {len(body)} bytes unpack to \d{{8,}}"):
        decode_prompts("a-key", body)
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("text", ["[" * 99_999, '"'])
def test_a_prompt_that_is_no_json_is_refused(text: str):
    columns: dict[str, list[object]] = {"prompt_id": ["a"], "token_ids": [[1]], "prompt": [text], "columns": ["{}"]}
    columns["opening"] = [None]
    with pytest.raises(CorruptObject, match="'a-key' is corrupt: a prompt or its columns are no JSON"):
        decode_prompts("a-key", compressed(columns))


@pytest.mark.slow
def test_whatever_is_written_can_be_read_also_if_it_packs_well():
    rows = [PromptRow("a", (1,), "a" * (65 << 20), {})]
    assert decode_prompts("a-key", encode_prompts(rows)) == rows
