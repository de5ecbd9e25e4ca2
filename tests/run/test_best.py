"""Tests of --load-best-model-at-end, --save-only-model and --push-to-hub.

The hub is a server in this process that speaks the part of the hub's protocol that an upload needs.
Read next: nanogrpo/run/state.py, nanogrpo/run/hub.py.
"""

import base64
import dataclasses
import http.server
import json
import logging
import re
import threading
from pathlib import Path

import pytest
import torch
import transformers

import train
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError, read_json
from nanogrpo.model import checkpoint
from nanogrpo.run import hub, optim, state
from tests.conftest import arguments, steps

GOOD = Config(model="base", data=("arithmetic",))
ALONE = World(0, 1, torch.device("cpu"))
BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1}


def saver(folder: Path, base: Path, **options) -> state.Saver:
    cfg = Config(**{"model": str(base), "output_dir": str(folder), **BEST, **options})
    model = checkpoint.load_model(base)
    tokenizer = checkpoint.Tokenizer(base)
    optimizer = optim.make_optimizer(model, cfg)
    return state.Saver(cfg, ALONE, model, optimizer, tokenizer, read_json(base / "config.json"), {})


def kept(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.checkpoints(str(folder))]


# --- the best checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize(("greater", "best"), [(True, 2), (False, 3)])
def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path, tiny_base, greater, best):
    options = {"save_total_limit": 1, "greater_is_better": greater}
    with saver(tmp_path, tiny_base, **options) as writer:
        for step, reward in enumerate([0.5, 0.9, 0.1, 0.9, 0.3], 1):
            writer.evaluated(step, {"eval/reward": reward, "eval/mean_length": 7.0})
            writer.save(step)
    assert kept(tmp_path) == [f"checkpoint-{best}", "checkpoint-5"]
    assert writer.best_checkpoint == tmp_path / f"checkpoint-{best}"
    # a resumed run knows it, unless the metric is another or the folder is gone
    assert saver(tmp_path, tiny_base, resume=True, **options).best == writer.best
    other = {**options, "metric_for_best_model": "mean_length"}
    assert saver(tmp_path, tiny_base, resume=True, **other).best is None
    writer.best_checkpoint.rename(tmp_path / "elsewhere")
    assert saver(tmp_path, tiny_base, resume=True, **options).best is None


def test_a_checkpoint_without_an_evaluation_is_not_the_best(tmp_path, tiny_base):
    with saver(tmp_path, tiny_base) as writer:
        writer.evaluated(0, {"eval/reward": 5.0})  # of the base model, which has no checkpoint
        writer.save(1)
        assert writer.best_checkpoint is None
        writer.evaluated(2, {"eval/reward": 0.1})
        writer.save(2)
        writer.evaluated(3, {"eval/mean_length": 1.0})  # the reward applied to no prompt
        writer.save(3)
    assert writer.best_checkpoint == tmp_path / "checkpoint-2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy_reward", 1.0),
        ("eval_mean_length", 3.0),
        ("eval/reward", 2.0),
        ("reward", 2.0),
        ("rewards/accuracy_reward", 1.0),
        ("eval_reward", 2.0),  # this and the next as TRL logs them
        ("eval_rewards/accuracy_reward/mean", 1.0),
    ],
)
def test_the_metric_is_found_by_its_names(tmp_path, tiny_base, name, value):
    row = {"eval/rewards/accuracy_reward": 1.0, "eval/reward": 2.0, "eval/mean_length": 3.0}
    writer = saver(tmp_path, tiny_base, metric_for_best_model=name)
    writer.evaluated(1, row)
    assert writer.scored == (1, value)


def test_the_best_checkpoint_of_a_run_is_named_at_the_end(tiny_base, files, tmp_path, caplog):
    options = ["--eval-data", str(files / "data.jsonl"), "--eval-steps", "1", "--save-steps", "1"]
    options += ["--load-best-model-at-end", "--save-total-limit", "1", "--eval-samples", "4"]
    argv = arguments(tiny_base, files, tmp_path, *options)
    with caplog.at_level(logging.INFO, "nanogrpo"):
        assert train.main(argv) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = {row["eval/after"]: row["eval/reward"] for row in rows if row.get("eval/after")}
    best = max(scores, key=lambda step: scores[step])
    found = re.findall(r"best checkpoint: (\S+) \(reward \S+ after (\d+) steps\)", caplog.text)
    assert found == [(str(tmp_path / f"checkpoint-{best}"), str(best))]
    assert set(kept(tmp_path)) == {f"checkpoint-{best}", "checkpoint-3"}


def test_an_unknown_metric_ends_the_run_before_it_trains(tiny_base, files, tmp_path, capfd):
    """A new run, and one that is resumed and would otherwise lose the steps up to an evaluation."""
    options = ["--eval-data", str(files / "data.jsonl"), "--eval-steps", "1", "--save-steps", "1"]
    wrong = [*options, "--load-best-model-at-end", "--metric-for-best-model", "accuracy"]
    assert train.main(arguments(tiny_base, files, tmp_path, *wrong)) == 2
    assert not (tmp_path / "metrics.jsonl").exists()
    assert train.main(arguments(tiny_base, files, tmp_path, *options, "--max-steps", "1")) == 0
    assert train.main(arguments(tiny_base, files, tmp_path, *wrong, "--resume")) == 2
    assert len(steps(tmp_path)) == 1
    message = (
        "error: --metric-for-best-model accuracy is not a metric of the evaluation: choose one of"
        " even, mean_length, reward.\n"
    )
    assert capfd.readouterr().err.count(message) == 2


def test_a_metric_that_a_later_evaluation_lacks_is_a_warning(tmp_path, tiny_base, caplog):
    writer = saver(tmp_path, tiny_base, metric_for_best_model="pass@2/even")
    with pytest.raises(UserError, match="--metric-for-best-model pass@2/even is not a metric of"):
        writer.evaluated(0, {"eval/reward": 0.5})
    writer.evaluated(3, {"eval/reward": 0.5})
    assert "pass@2/even is missing in the evaluation after 3 steps" in caplog.text
    assert writer.scored is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_best_model_at_end": True}, "--load-best-model-at-end is True, which has no effect"),
        (
            {"load_best_model_at_end": True, "eval_steps": 20},
            "--load-best-model-at-end compares checkpoints that were evaluated, but --save-steps",
        ),
        ({**BEST, "save_steps": 0}, "--load-best-model-at-end compares checkpoints that were eval"),
        ({"greater_is_better": False}, "--greater-is-better is False, which has no effect without"),
        ({"push_to_hub": True, "hub_model_id": "a/b/c"}, "--hub-model-id 'a/b/c' is no repository"),
        ({"push_to_hub": True, "hub_model_id": "a b"}, "--hub-model-id 'a b' is no repository"),
        ({"hub_private_repo": True}, "--hub-private-repo is True, which has no effect without"),
        ({"optim": "adafactor"}, "--optim is 'adafactor': choose one of adamw_torch_fused, adamw_"),
    ],
)
def test_options_that_do_not_fit_get_one_sentence(options, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        dataclasses.replace(GOOD, **options).validate()
    assert re.fullmatch(r"[^\n]+\.", str(error.value))


# --- only the model -------------------------------------------------------------------------------


def test_a_checkpoint_of_only_the_model_loads_but_does_not_resume(
    tiny_base, files, tmp_path, capfd
):
    argv = arguments(tiny_base, files, tmp_path, "--save-only-model", "--max-steps", "1")
    assert train.main(argv) == 0
    folder = tmp_path / "checkpoint-1"
    assert not (folder / "state").exists()
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert train.main([*argv, "--resume", "--max-steps", "2"]) == 2
    message = (
        f"error: --resume: {folder} was written with --save-only-model and cannot be continued"
    )
    assert message in capfd.readouterr().err


# --- the hub --------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers create_repo and create_commit, and keeps what it gets."""

    got: dict = {}  # noqa: RUF012 (the server makes a new handler for each request)
    status = 200

    def do_POST(self) -> None:
        if "Content-Length" in self.headers:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        else:  # a commit is sent in chunks, each after its size
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if self.status != 200:
            answer: dict = {"error": "storage is full"}
        elif self.path == "/api/repos/create":
            self.got["repo"] = json.loads(body)
            answer = {"url": f"http://{self.headers['Host']}/me/{self.got['repo']['name']}"}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
            answer = {"files": files}
        elif "/validate-yaml" in self.path:
            answer = {"errors": [], "warnings": []}
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            self.got["commit"] = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            answer = {
                "commitUrl": f"http://{self.headers['Host']}/me/run/commit/1",
                "commitOid": "1",
            }
        text = json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "got", {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    yield address
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path, tiny_base) -> Path:
    with saver(tmp_path / "run", tiny_base) as writer:
        writer.save(3)
    return writer.final


def test_adapters_alone_are_uploaded_to_the_top_of_the_repository(endpoint, tmp_path):
    folder = tmp_path / "checkpoint-3"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    hub.push(dataclasses.replace(GOOD, lora_r=4, save_merged=False), folder)
    assert Hub.got["commit"].keys() == {"README.md", "adapter_config.json"}
    assert b"library_name: peft\n" in Hub.got["commit"]["README.md"]


def test_a_checkpoint_is_uploaded_with_a_card_and_without_its_state(endpoint, folder, caplog):
    cfg = dataclasses.replace(
        GOOD, model="Qwen/Qwen3-0.6B", data=("/secret/a.jsonl",), output_dir=str(folder.parent),
        hub_private_repo=True,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "nanogrpo"):
        hub.push(cfg, folder)
    assert Hub.got["repo"]["name"] == "run"
    repo = Hub.got["repo"]  # the second is how older clients say it
    assert repo.get("visibility") == "private" or repo["private"] is True
    files = Hub.got["commit"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert not any("state" in name for name in files)
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    assert "3 steps of 64 completions" in card
    assert "`a.jsonl`" in card
    assert "/secret" not in card
    assert f"uploaded {folder}: {endpoint}/me/run/commit/1" in caplog.text


def test_a_failed_upload_only_warns(endpoint, folder, caplog, monkeypatch):
    monkeypatch.setattr(Hub, "status", 507)
    cfg = dataclasses.replace(GOOD, output_dir=str(folder.parent), hub_model_id="me/mine")
    hub.push(cfg, folder)
    (record,) = caplog.records
    message = record.getMessage()
    assert re.match(r"the upload to me/mine failed \(.+\); the checkpoint is complete, ", message)
    assert f"hf upload me/mine {folder}" in message
    assert "\n" not in message


def test_without_a_token_the_run_does_not_start(tiny_base, files, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert train.main(arguments(tiny_base, files, tmp_path, "--push-to-hub")) == 2
    message = "error: --push-to-hub needs a token of the hub: log in with `hf auth login` or set"
    assert message in capfd.readouterr().err


def test_a_run_that_cannot_upload_is_complete(tiny_base, files, tmp_path, monkeypatch, caplog):
    """Here huggingface_hub is offline, as its own variable would make it."""
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    argv = arguments(tiny_base, files, tmp_path, "--push-to-hub", "--max-steps", "1")
    assert train.main(argv) == 0
    assert f"the upload to {tmp_path.name} failed (" in caplog.text
    assert kept(tmp_path) == ["checkpoint-1"]
