"""Small runs on examples: their configuration, and the completions and conversations that they learn."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tasks.configuration.run_config import RunConfig, parse
from tests.small_run import document, model_directory

URL = "memory://examples"
SEEN = 64
TALKS = [
    [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4")],
    [
        ("system", "add"),
        ("user", "3+3?"),
        ("assistant", "it=6"),
        ("user", "so?"),
        ("assistant", "6"),
        ("user", "ok"),
    ],
    [("user", "5?"), ("assistant", "5")],
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def config(model: Path, **sections: Any) -> RunConfig:
    """A run on the worked examples of the generator; `sections` as in `small_run.document`."""
    given = document(
        URL,
        model,
        **{
            "data": {"limit": SEEN, "completion_column": "worked"},
            "sampling": {"max_completion_length": 90},
            "rollout": {"context_length": 240},
            "algorithm": {"kind": "sft"},
        }
        | sections,
    )
    del given["rewards"], given["run"]["num_generations"]
    return parse(given)


def chatting_model(folder: Path) -> Path:
    """A model directory whose tokenizer has a chat template."""
    model = model_directory(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    return model


def rows_file(file: Path, rows: list[dict[str, Any]]) -> str:
    """The path of a file with these rows."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def conversations(folder: Path) -> dict[str, Any]:
    """The section `data` of TALKS, as whole conversations."""
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
    source = rows_file(folder / "talks.jsonl", rows)
    return {"source": source, "prompt_column": "messages", "completion_column": None, "shuffle": False}
