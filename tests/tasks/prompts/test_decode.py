from dataclasses import replace

import numpy as np
import pytest

from storage.records.records import SamplingParams
from tasks.prompts.decode import open_completion_decoder, open_decoder
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


def test_rewards_see_special_tokens_if_they_are_kept_but_not_the_end(model_dir):
    ids = tiny_tokenizer()("1+2")["input_ids"]
    kept = SamplingParams(stop_token_ids=(2, 3), skip_special_tokens=False)
    decode = open_completion_decoder(model_dir, kept)
    assert decode([1, *ids, 0, 2]) == decode(np.array([1, *ids, 0, 3])) == "<bos>1+2<pad>"
    # A response that was cut has none, and one within it (of an earlier turn) is text.
    assert decode([*ids, 2, *ids]) == "1+2<eos>1+2"
    assert decode([2]) == decode([]) == ""
    skipped = open_completion_decoder(model_dir, replace(kept, skip_special_tokens=True))
    assert skipped([1, *ids, 0, 2]) == skipped([1, *ids, 0]) == "1+2"
