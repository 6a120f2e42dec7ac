"""Secrets where a run or a fleet would keep and show them: refused by the field, and never repeated.

A new case is a line in SECRETS or HARMLESS: (value, the name that it is given for).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gleaner import main
from resources.secret_text import names_secret, secret_in, without_secrets
from tasks.configuration.problems import given_secrets
from tasks.configuration.run_config import ConfigError, dump, parse
from tests.small_run import document

ALNUM = "Ab1C" * 10
MARK = "hunter2"
SECRETS = [
    *((f"hf_{ALNUM}", ""), (f"hf_{'a' * 34}", ""), (f"with hf_{ALNUM[:36]} inside", "note")),
    *((f"sk-{ALNUM}", ""), (f"sk-proj-{ALNUM}", ""), (f"sk-ant-api03-{ALNUM}", ""), (f"sk_live_{ALNUM}", "")),
    *(("AKIAIOSFODNN7EXAMPLE", ""), ("ASIAIOSFODNN7EXAMPLE", ""), (f"ghp_{ALNUM[:36]}", ""), (f"gho_{ALNUM}", "")),
    *((f"github_pat_{ALNUM}", ""), (f"glpat-{ALNUM[:20]}", ""), ("xoxb-123456789012-abcdef", ""), (f"AIza{ALNUM}", "")),
    *((f"eyJ{ALNUM}.eyJ{ALNUM}.{ALNUM}", ""), (f"AccountName=a;AccountKey={ALNUM}==", ""), (f"Bearer {ALNUM}", "")),
    *(("-----BEGIN PRIVATE KEY-----\n", ""), (f"nvapi-{ALNUM}", ""), (f"npm_{ALNUM}", ""), (f"gsk_{ALNUM}", "")),
    *(("postgres://u:hunter2@host/db", "URL"), ("redis://:hunter2@host", ""), ("https://u:hunter2@h/x", "")),
    *(("s3://key:hunter2@bucket/x", ""), ("mongodb+srv://u:p%40w@h", ""), ("http://u:p@w@h:80/x?y=1#z", "")),
    *(("https://b.s3.amazonaws.com/x?X-Amz-Signature=hunter2&x=1", ""), ("https://h/x?token=hunter2", "")),
    *(("https://a.blob.core.windows.net/c?sv=1&sig=hunter2", ""), ("https://h/?a=b&api_key=hunter2", "")),
    *((MARK, "DB_PASS"), (MARK, "PGPASSWORD"), (MARK, "DB_PWD"), (MARK, "PGPASS"), (MARK, "SMTP_PASS"), (MARK, "pass")),
    *((MARK, "HF_TOKEN"), (MARK, "token"), (MARK, "access_token"), (MARK, "authToken"), (MARK, "GITHUB_TOKEN")),
    *((MARK, "AWS_SECRET_ACCESS_KEY"), (MARK, "api_key"), (MARK, "apiKey"), (MARK, "API_KEY"), (MARK, "apikey")),
    *((MARK, "OPENAI_API_KEY"), (MARK, "api-key"), (MARK, "api_keys"), (MARK, "private_key"), (MARK, "STORAGE_KEY")),
    *((MARK, "client_secret"), (MARK, "secrets"), (MARK, "password"), (MARK, "dbpassword"), (MARK, "passphrase")),
    *((MARK, "credentials"), (MARK, "Authorization"), (MARK, "MYSQL_ROOT_PASSWORD"), ("123456789", "password")),
]
HARMLESS = [
    *(("512", "max_tokens"), ("x", "tokens"), ("all", "num_tokens"), ("x", "stop_tokens"), ("x", "tokens_per_s")),
    *(("Qwen/Qwen2.5-0.5B", "tokenizer"), ("x", "token_level"), ("</think>", "end_token"), ("x", "bos_token")),
    *(("[PAD]", "pad_token"), ("<|im_end|>", "token"), ("x", "eosToken"), ("x", "special_token"), ("x", "image_token")),
    *(("sk-learn-pipeline-with-a-long-name", ""), ("scikit-learn==1.5", ""), ("sk-", ""), ("/models/sk-base-v2/x", "")),
    *(("d6cd1e2bd19e03a81132a23b2025920577f84e37", "revision"), ("a" * 64, "digest"), ("0" * 40, "commit")),
    *(("hf_internal_testing/tiny-random", ""), ("hf_transformers_backend_v2", ""), ("hf_datasets", "source")),
    *(("task-1234567890abcdef12345", ""), ("risk-1234567890123456789", ""), ("disk-" + "a1" * 20, "")),
    *(("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", ""), ("glm-4-9b-chat-hf-long-name-1234", ""), ("AKIA", "")),
    *(("ssh://git@github.com/x", ""), ("s3://bucket/key=1", ""), ("s3://bucket/user@host/x", "url")),
    *(("http://host:8080/a@b", ""), ("https://h/x?page=2&key=value", ""), ("https://h/x?tokens=5", "")),
    *(("git+https://github.com/a/b@0123456789abcdef0123456789abcdef01234567", ""), ("Solve x: y@z", "")),
    *(("first", "first_pass"), ("x", "pass_at_k"), ("5", "n_pass"), ("x", "compass"), ("x", "passage")),
    *(("true", "use_auth_token"), ("none", "api_key"), ("", "api_key"), ("???", "api_key"), ("$(DB_PASS)", "DB_PASS")),
    *(("postgres://u:$(PW)@h/db", "URL"), ("${TOKEN}", "token"), ("/var/secrets/key.json", "GOOGLE_CREDENTIALS")),
    *(("answer", "key"), ("answer", "prompt_key"), ("x", "cache_key"), ("x", "public_key"), ("x", "primary_key")),
    *(("x", "monkey"), ("x", "hotkey"), ("x", "key_words"), ("/work", "PWD"), ("/old", "OLDPWD"), ("x", "secretName")),
    *(("x", "secretary"), ("x", "password_column"), ("x", "author"), ("basic arithmetic problems with numbers", "")),
    *(("bearer of the ring in a long story", ""), ("eyJhbGci", ""), ("\\boxed{x} at a: b@c", "pattern")),
]


@pytest.mark.parametrize(("value", "name"), SECRETS)
def test_a_secret_is_known_by_its_shape_or_its_name_and_not_repeated(value, name):
    what = secret_in(value, name)
    assert what is not None
    assert MARK not in what
    assert value not in what


@pytest.mark.parametrize(("value", "name"), HARMLESS)
def test_usual_values_are_no_secrets(value, name):
    assert secret_in(value, name) is None


@given(st.text(st.characters(codec="utf-8")))
def test_whatever_the_text_is_the_answer_does_not_repeat_it(text):
    for name in ("", "api_key", text):
        what = secret_in(text, name)
        assert what is None or len(text) < 12 or text not in what
    assert names_secret("api_key")


SEARCHED = """
from resources.secret_text import LENGTH_MAX, secret_in, without_secrets
for piece in "a sk- eyJ -eyJaaaaaaaa :// :a token= a= -----BEGIN_PRIVATE_KEY ?a bearer_".split():
    piece = piece.replace("_", " ")
    for text in ("://" + piece * LENGTH_MAX, piece * LENGTH_MAX):
        assert len(without_secrets(text)) <= LENGTH_MAX
        secret_in(text[:LENGTH_MAX], "api_key")
"""


@pytest.mark.slow
def test_no_text_of_an_error_is_searched_for_long():
    # Another process, because a search that goes on for hours holds up every thread of its own.
    subprocess.run([sys.executable, "-c", SEARCHED], check=True, timeout=120)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"-----BEGIN RSA PRIVATE KEY-----\n{MARK}\n{MARK}\n-----END RSA PRIVATE KEY-----\nthe rest", "***\nthe rest"),
        (f'"private_key": "-----BEGIN PRIVATE KEY-----\\n{MARK}', '"private_key": "***'),
        (f"--api-key={MARK}, Signature: {MARK}; token={MARK}=b", "--api-key=***, Signature: ***; token=***"),
        (f"s3://k:{MARK}@b/x https://h/x?sig={MARK}&a=1", "s3://k:***@b/x https://h/x?sig=***&a=1"),
    ],
)
def test_nothing_of_a_secret_is_left_in_a_text(text, shown):
    assert without_secrets(text) == shown


def with_secret(url, model, place):
    """A configuration with a secret at a place."""
    pools = {"rollout": {"count": 2}}
    secrets = {
        "env url": {"pools": {"rollout": {"env": [{"name": "DB", "value": f"postgres://u:{MARK}@h/db"}]}}},
        "env name": {"pools": {"train": {"env": [{"name": "DB_PASS", "value": MARK}]}}},
        "env token": {"pools": {"more_rollout": {"far": {"env": [{"name": "X", "value": f"hf_{ALNUM}{MARK}"}]}}}},
        "label": {"pools": {"control": {"labels": {"a/b": f"ghp_{ALNUM}{MARK}"}}}},
        "argument": {"rewards": [{"function": "m:f", "arguments": {"api_key": MARK}}]},
        "nested argument": {"rewards": [{"function": "m:f", "arguments": {"client": {"api": {"key": MARK}}}}]},
        "listed argument": {"rewards": [{"function": "m:f", "arguments": {"passwords": [MARK]}}]},
        "number": {"rewards": [{"function": "m:f", "arguments": {"password": 1234567890}}]},
        "argument by shape": {"rewards": [{"function": "m:f", "arguments": {"judge": f"sk-{ALNUM}{MARK}"}}]},
        "evaluation": {"evaluation": {"rewards": [{"function": "m:f", "arguments": {"token": MARK}}]}},
        "chat template": {"data": {"source": "x.jsonl", "chat_template_kwargs": {"api_key": MARK}}},
        "source": {"data": {"source": f"https://u:{MARK}@host/rows.jsonl"}},
        "policy": {"policy": {"path": f"https://hf_{ALNUM}{MARK}@host/model"}},
        "fleet": {"trainer": {"fleet": f"s3://key:{MARK}@bucket/fleet"}},
        "unknown section": {"turns": {"arguments": {"api_key": MARK}}},
        "unknown field": {"run": {"url": url, "password": MARK}},
        "url": {"run": {"url": f"s3://key:{MARK}@bucket/runs"}},
        "signed url": {"run": {"url": f"s3://bucket/runs?X-Amz-Signature={MARK}"}},
    }
    return document(url, model, **({"pools": pools} | secrets[place])) if place else list(secrets)


@pytest.mark.parametrize("place", with_secret("", Path(), ""))
def test_a_configuration_with_a_secret_is_refused_by_its_field_without_it(tmp_path, place):
    whole = with_secret(str(tmp_path / "run"), Path("/model"), place)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(whole))
    done = CliRunner().invoke(main, ["check", str(file)])
    lines = done.output.splitlines()
    assert done.exit_code == 1
    assert MARK not in done.output
    assert "1234567890" not in done.output
    assert len(lines) == 2, done.output
    assert lines[1].partition(": ")[0].split(".")[0].strip() in whole
    assert "given; allowed: " in lines[1]
    with pytest.raises(ConfigError) as refused:
        parse(whole)
    assert len(refused.value.problems) == 1


def test_the_pools_own_way_to_a_secret_is_taken(tmp_path):
    pool = {
        "secrets": [{"group": "database", "key": "password", "env_var": "DB_PASS"}],
        "env": [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token"}}},
            {"name": "DB", "value": "postgres://u:$(DB_PASS)@h/db"},
        ],
    }
    config = parse(document(str(tmp_path), Path("/model"), pools={"rollout": {"count": 1, **pool}}))
    assert list(given_secrets(dump(config))) == []


def test_no_configuration_of_the_project_is_taken_for_a_secret():
    found = sorted(Path(__file__).parents[2].glob("examples/*.yaml"))
    assert found
    for file in found:
        assert list(given_secrets(yaml.safe_load(file.read_text()))) == []


@pytest.mark.parametrize(
    "prefix",
    [f"s3://key:{MARK}@bucket/runs", f"https://u:{MARK}@h/x", f"s3://b/x?sig={MARK}", f"/runs/hf_{ALNUM}{MARK}"],
)
def test_a_fleet_does_not_show_a_secret_in_its_rules(tmp_path, prefix):
    done = CliRunner().invoke(main, ["fleet", "init", str(tmp_path / "fleet"), "--runs", prefix])
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert done.output.startswith("gleaner: --runs: ")
    assert MARK not in done.output
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize("url", [f"s3://key:{MARK}@bucket/x", f"https://u:{MARK}@h/x", f"s3://b/x?sig={MARK}"])
@pytest.mark.parametrize("command", [["status"], ["watch", "--once"], ["fleet", "status"], ["check", "--store"]])
def test_no_command_repeats_the_secret_of_a_url(command, url):
    done = CliRunner().invoke(main, [*command, url])
    assert done.exit_code == 1
    assert done.output.startswith("gleaner: ")
    assert MARK not in done.output
