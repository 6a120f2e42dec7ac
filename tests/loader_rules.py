"""The rule for what loads models and tokenizers: from this machine only, and without the code of a model's folder."""

import ast
from collections.abc import Iterator

from tests.architecture import Tree

# Both must be said at every call. Without the second, transformers runs a folder's code once somebody types "y".
WANTED = {"local_files_only": "True", "trust_remote_code": "False"}
# A model without weights is made of a configuration, so nothing is fetched; but its code may lie in the folder.
WANTED_BY_NAME = {"from_pretrained": WANTED, "from_config": {"trust_remote_code": "False"}}


def open_loaders(tree: Tree) -> Iterator[str]:
    """Calls, also by partial or as a value, of `from_pretrained`, or of an AutoModel's `from_config`, without WANTED.

    Tests load only what they have made themselves.
    """
    for source in tree.sources:
        if not source.path.startswith("tests/"):
            for node, given in _loaders(source.tree):
                wanted = WANTED_BY_NAME[node.attr]
                lacking = [f"{name}={value}" for name, value in wanted.items() if given.get(name) != value]
                if lacking:
                    yield f"{source.path}:{node.lineno}: {ast.unparse(node)} without {', '.join(lacking)}"


def _loaders(module: ast.Module) -> Iterator[tuple[ast.Attribute, dict[str | None, str]]]:
    """Every mention of a loader, with the keywords that it is given where it is called or bound by `partial`."""
    given: dict[ast.expr, dict[str | None, str]] = {}
    for call in ast.walk(module):
        if isinstance(call, ast.Call):
            loader = call.args[0] if _last_name(call.func) == "partial" and call.args else call.func
            if _loads(loader):
                given[loader] = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and _loads(node):
            yield node, given.get(node, {})


def _loads(node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    # AutoHfQuantizer and others have a from_config that builds no model.
    is_model = _last_name(node.value).startswith("AutoModel")
    return node.attr == "from_pretrained" or (node.attr == "from_config" and is_model)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
