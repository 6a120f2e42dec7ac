import pytest

from tasks.configuration.user_function import NotAFunction, load_function


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder from which modules are imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("module", ["nobodys_module", "nobodys_package.module"])
def test_the_folders_that_were_searched_for_a_missing_module_are_named(folder, module):
    with pytest.raises(ModuleNotFoundError) as caught:
        load_function(f"{module}:grade")
    top = module.partition(".")[0]
    assert str(caught.value).startswith(f"No module named {top!r}; searched: {folder}, ")
    assert str(caught.value).endswith(", the installed packages")
    assert "site-packages" not in str(caught.value)


def test_a_module_that_imports_a_missing_one_is_not_called_missing(folder):
    (folder / "imports_too_much.py").write_text("import nobodys_dependency")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nobodys_dependency'$"):
        load_function("imports_too_much:grade")


def test_a_name_that_the_module_lacks_is_told_with_the_names_that_it_has(folder):
    (folder / "has_others.py").write_text("def grade(): ...\ndef grade_all(): ...")
    with pytest.raises(NotAFunction, match=r"^has_others has no 'score'; there are: grade, grade_all$"):
        load_function("has_others:score")
