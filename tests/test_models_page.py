"""The page of models says what trainer and torch engine do with each family; `check` refuses what either refuses.

With WRITE_MODELS_PAGE=1 the test writes the page's table anew.
"""

import pytest

from tasks.preparing.model_check import check_model_use
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.model_families import CONTEXT_LENGTH, FAMILIES
from tests.models_page import RIGHT, agree, of_engine, of_trainer, shown
from tests.small_run import config


@pytest.mark.slow
def test_the_page_says_what_trainer_and_torch_engine_do_with_each_family(tmp_path):
    trained, generated, checked = {}, {}, {}
    for number, family in enumerate(FAMILIES):
        model = tmp_path / str(number)
        family.save(model)
        trained[family.title] = of_trainer(model)
        generated[family.title] = of_engine(
            model,
            lambda model=model: TorchEngine(
                model, max_responses_in_flight=2, context_length=CONTEXT_LENGTH, device="cpu"
            ),
        )
        asked = config("memory://models-page", model, rollout={"engine": "torch", "context_length": CONTEXT_LENGTH})
        try:
            checked[family.title] = not check_model_use(asked, model).doubts
        except ValueError:
            checked[family.title] = False
    assert agree("trainer", trained) == {}
    assert agree("torch engine", generated) == {}
    usable = {title: trained[title] == generated[title] == RIGHT for title in trained}
    # What the trainer computes by other rotations is right for the pass that was compared with it.
    assert {title for title in usable if usable[title] != checked[title]} == set()
    assert shown().keys() == trained.keys()
    assert sum(usable.values()) > len(FAMILIES) // 2
