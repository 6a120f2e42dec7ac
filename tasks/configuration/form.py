"""The fields of a first run as a JSON schema, from which Flyte's console makes a form.

A form of all fields has more than 200, and 52 kB in each registered workflow, which propeller reads at every look. The
form therefore has the fields of `in_force.ESSENTIAL`. A document may hold the others, too, by the same names.

The console fills sections of a form in, and defaults. Sections that may be absent are therefore left out, because an
empty one has a meaning, and defaults are in the text: what is not filled in stays the package's choice.
"""

import json
import re
from typing import Any

from pydantic import TypeAdapter

from tasks.configuration.in_force import ESSENTIAL
from tasks.configuration.run_config import RunConfig

# Of sections that are there as a whole.
_REWARD = ("function", "weight")
_POOL = ("machine", "count", "gpus", "accelerator", "cpu", "memory")
_KEPT = ("type", "enum", "const", "minimum", "exclusiveMinimum", "maximum", "minLength")


def form() -> dict[str, Any]:
    """The schema: nested objects without references, unions or nulls, which the console cannot show."""
    whole = TypeAdapter(RunConfig).json_schema()
    sections = {name: fields for name, fields in ESSENTIAL.items() if "anyOf" not in whole["properties"][name]}
    found = {section: _section(whole, section, fields) for section, fields in sections.items()}
    required = [section for section in whole["required"] if section in found]
    return {"title": "RunConfig", "type": "object", "properties": found, "required": required}


def _section(whole: dict[str, Any], section: str, fields: tuple[str, ...] | None) -> dict[str, Any]:
    described = _resolved(whole, whole["properties"][section])
    if fields is None:
        return {
            "type": "array",
            "title": section,
            "items": _fields(whole, _resolved(whole, described["items"]), _REWARD),
        }
    if section == "pools":
        pools = {pool: _fields(whole, _resolved(whole, described["properties"][pool]), _POOL) for pool in fields}
        return {"type": "object", "title": section, "properties": pools}
    return {"title": section, **_fields(whole, described, fields)}


def _fields(whole: dict[str, Any], described: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a section with these of its fields alone."""
    lines = re.sub(r"\n {8,}", " ", described.get("description", ""))
    meanings = dict(re.findall(r"^    (\w+): (.*?\.)(?= |$)", lines, re.MULTILINE))
    found = {}
    for name in fields:
        field = _resolved(whole, described["properties"][name])
        default = f"Default: {json.dumps(field['default'])}." if "default" in field else ""
        kept = {key: field[key] for key in _KEPT if key in field}
        found[name] = {"title": name, **kept, "description": f"{meanings.get(name, '')} {default}".strip()}
    required = [name for name in described.get("required", ()) if name in found]
    return {"type": "object", "properties": found, "required": required}


def _resolved(whole: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without a reference, and without null among what is allowed."""
    for branch in field.get("anyOf", ()):
        if branch.get("type") != "null":
            return _resolved(whole, {**field, **branch, "anyOf": ()})
    if "$ref" in field:
        return {**whole["$defs"][field["$ref"].rpartition("/")[2]], **{k: v for k, v in field.items() if k != "$ref"}}
    return field
