"""The order of storage's shelves, read from their imports."""

from pathlib import Path

from tests.architecture import ROOT, TESTING, Tree

SHELVES = ("stores", "records", "weights", "journal", "fleet")


def shelf_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "storage" and len(parts) > 2 else ""


def imports_of_later_shelves(tree: Tree) -> list[str]:
    """Imports of a shelf from an earlier one, or from the files beside the shelves."""
    found = []
    for source in tree.sources:
        if not source.path.startswith("storage/") or TESTING.fullmatch(source.name):
            continue
        own = shelf_of(source.name)
        allowed = SHELVES[: SHELVES.index(own) + 1] if own else ()
        targets = {shelf_of(tree.module(one.target) or "") for one in source.imports}
        found += [f"{source.name} imports {target}" for target in sorted(targets - {"", *allowed})]
    return found


def test_a_shelf_imports_only_itself_and_the_shelves_before_it():
    tree = Tree(ROOT)
    assert {shelf_of(source.name) for source in tree.sources} - {""} == set(SHELVES)
    assert imports_of_later_shelves(tree) == []


def test_an_import_of_a_later_shelf_is_found(tmp_path: Path):
    for path in ("storage/stores/store.py", "storage/fleet/seats.py", "storage/digests.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "storage/stores/store.py").write_text("from storage import digests\nfrom storage.fleet import seats\n")
    (tmp_path / "storage/digests.py").write_text("import storage.stores.store\n")
    assert sorted(imports_of_later_shelves(Tree(tmp_path))) == [
        "storage.digests imports stores",
        "storage.stores.store imports fleet",
    ]
