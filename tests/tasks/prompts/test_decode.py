import numpy as np
import pytest

from tasks.prompts.decode import open_decoder
from tests.tiny_model import tiny_config, tiny_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(directory)
    tiny_config().save_pretrained(directory)
    return directory


def test_special_tokens_are_no_text(model_dir):
    ids = tiny_tokenizer()("1+2=3")["input_ids"]
    decode = open_decoder(model_dir)
    assert decode([1, *ids, 2, 0]) == "1+2=3"
    assert decode([2]) == decode([]) == ""


def test_any_sequence_of_ids_will_do(model_dir):
    ids = tiny_tokenizer()("so, 7")["input_ids"]
    decode = open_decoder(model_dir)
    assert decode(tuple(ids)) == decode(np.array(ids, dtype=np.int32)) == "so, 7"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises((OSError, ValueError)):
        open_decoder(tmp_path)
