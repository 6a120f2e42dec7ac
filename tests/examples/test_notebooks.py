"""The notebooks: whole documents of nbformat 4, without outputs, whose cells run in order on a run of this machine."""

import ast
import json
import runpy
from pathlib import Path

import pytest

from storage.journal.retention import settle
from storage.stores.connect import connect
from tests.small_run import commit_iteration, config, plan_iteration, roll_out, train_small

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
READING = next(path for path in NOTEBOOKS if path.name == "read_a_run.ipynb")


def cells(path: Path, kind: str) -> list[str]:
    document = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == kind]


def executed(path: Path, folder: Path) -> list[object]:
    """The values that its code cells show, as a notebook does: the last expression of each, unless it is None."""
    program = ast.Module([], [])
    for cell in cells(path, "code"):
        statements = ast.parse(cell).body
        if isinstance(statements[-1], ast.Expr):
            call = ast.Call(ast.Name("show", ast.Load()), [statements[-1].value], [])
            statements[-1] = ast.Expr(call)
        program.body += statements
    script = folder / "cells.py"
    script.write_text(ast.unparse(ast.fix_missing_locations(program)))
    shown: list[object] = []
    runpy.run_path(str(script), init_globals={"show": shown.append})
    return [value for value in shown if value is not None]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_a_document_of_nbformat_4_without_outputs(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in document["cells"]]
    assert len(set(names)) == len(names)
    for cell in document["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys()
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
def test_the_notebook_reads_and_plots_a_run(tmp_path, model, monkeypatch, capsys):
    url = str(tmp_path / "runs" / "demo")
    for iteration in range(2):
        plan_iteration(config(url, model))
        roll_out(url, iteration)
        train_small(url, iteration)
        commit_iteration(url, iteration)
    settle(connect(url), 0)
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")  # as Jupyter does
    opened, metrics, reward, lengths, groups = executed(READING, tmp_path)
    run, iterations = opened
    assert (run.url, iterations) == (connect("../runs/demo").url, [0, 1])
    assert list(metrics["reward"]) == run.metrics["reward"].to_pylist()
    for drawing in (reward, lengths):
        assert drawing._repr_html_().startswith("<svg")
        assert "no data" not in drawing.svg
    assert "Lengths in iteration 1" in lengths.svg
    assert len(groups) == 4
    printed = capsys.readouterr().out
    assert "% of the groups teach nothing" in printed
    assert printed.count("reward ") == 2
    assert "parameters, torch.float32; learning rate 0.01" in printed
