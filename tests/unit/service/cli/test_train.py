"""`posttrain train`, `config init` and `data inspect`: what wins, what is refused, and how a run is watched and stopped."""

import json
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from posttrain_service.cli.flags import flags
from posttrain_service.cli.inspection import show_inspection
from posttrain_service.cli.main import app
from posttrain_service.cli.profile import PRESETS, presets, read_profile, resolve
from posttrain_service.errors import InvalidRequest
from posttrain_trainer.contract.spec import FullTrainingArguments, LoraArguments, TorchrunArguments

PATHS = ("--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o")

# Every name of the two sections as trainers have them, numbers that YAML 1.1 reads as text among them.
PROFILE = """
train_args:
  model_path: m
  data_path: d.jsonl
  ckpt_output_dir: out
  data_output_dir: out/data
  max_seq_len: 512
  max_batch_len: 1024
  num_epochs: 3
  effective_batch_size: 16
  save_samples: 0
  learning_rate: 2e-6
  warmup_steps: 25
  is_padding_free: true
  random_seed: 42
torch_args:
  nnodes: 1
  nproc_per_node: 2
  node_rank: 0
  rdzv_id: 123
  rdzv_endpoint: 127.0.0.1:12222
"""


def run(*words, code=0, **env):
    result = CliRunner().invoke(app, [*words], env=env)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def printed(*words):
    text = run("train", *words, "--print-resolved").stdout
    sources = {line.split(":")[0].strip(): line.rsplit("# ", 1)[1] for line in text.splitlines() if "  # " in line}
    return yaml.safe_load(text), sources


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE)
    return path


def test_flags_win_over_the_profile_and_the_profile_over_defaults(profile):
    values, sources = printed(
        "--train-profile", str(profile), "--learning-rate", "1e-5", "--lora.rank", "8", "--no-is-padding-free",
        "--adamw-betas", "0.8,0.9", "--loggers", "tensorboard,wandb", "--nproc-per-node", "1", "--max-grad-norm", "none",
    )  # fmt: skip
    train = values["train_args"]
    assert (float(train["learning_rate"]), sources["learning_rate"]) == (1e-5, "flag")
    assert (train["num_epochs"], sources["num_epochs"]) == (3, "profile")
    assert (train["lora"]["rank"], sources["rank"]) == (8, "flag")
    assert (train["lora"]["alpha"], sources["alpha"]) == (32.0, "default")
    assert (train["is_padding_free"], train["adamw_betas"], train["max_grad_norm"]) == (False, [0.8, 0.9], None)
    assert [logger["kind"] for logger in train["loggers"]] == ["tensorboard", "wandb"]
    assert (values["torch_args"]["nproc_per_node"], sources["nproc_per_node"]) == (1, "flag")
    assert (values["torch_args"]["rdzv_id"], sources["rdzv_id"]) == ("123", "profile")


def test_what_is_printed_is_a_profile_again(profile, tmp_path):
    first = run("train", "--train-profile", str(profile), "--print-resolved").stdout
    again = tmp_path / "again.yaml"
    again.write_text(first)
    one, two = (resolve(read_profile(path), {}) for path in (profile, again))
    assert (one.train_args, one.torch_args) == (two.train_args, two.torch_args)
    assert one.train_args.learning_rate == 2e-6


def test_every_argument_is_a_flag():
    found = {".".join(flag.path) for flag in flags()}
    assert {*FullTrainingArguments.model_fields, *TorchrunArguments.model_fields} <= found
    assert {f"lora.{name}" for name in LoraArguments.model_fields} <= found
    assert {"method.beta", "method.text_column", "fsdp.sharding"} <= found
    text = run("train", "--help", COLUMNS="400", TERMINAL_WIDTH="400").stdout
    assert [flag.option for flag in flags() if f"--{flag.option}" not in text] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*PATHS, "--learning-rate", "-1"), "learning_rate (flag)"),
        (PATHS[:4], "ckpt_output_dir: Field required"),
        ((*PATHS, "--profile-steps", "[1,"), "--profile-steps: the value is no JSON"),
        ((*PATHS, "--nnodes", "2"), "name where the nodes meet by rdzv_endpoint"),
    ],
)
def test_wrong_values_are_refused_by_name(words, said):
    result = run("train", *words, "--print-resolved", code=1)
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "no YAML"), ("- a", "no mapping"), ("lerning_rate: 1", "no argument 'lerning_rate'"), ("train_args: {num_epochs: 1}\nnum_epochs: 2", "twice")],
)
def test_a_profile_that_is_none_is_refused(tmp_path, text, said):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        read_profile(path)


def test_shipped_profiles_are_valid():
    assert presets() == ["1-gpu", "8-gpu", "cpu", "mps"]
    for name in presets():
        given = read_profile(PRESETS / f"{name}.yaml")
        paths = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}
        resolved = resolve(given, {"train_args": paths})
        ranks = 8 if name == "8-gpu" else 1
        assert (resolved.torch_args.nproc_per_node, resolved.train_args.device) == (ranks, name if name in ("cpu", "mps") else "cuda")


def test_config_init_writes_then_checks(tmp_path):
    path = tmp_path / "p.yaml"
    run("config", "init", "--train-profile", str(path), "--preset", "cpu")
    content = yaml.safe_load(path.read_text())
    assert content["train_args"]["lora"]["rank"] == 16
    comments = path.read_text()
    assert [name for name in FullTrainingArguments.model_fields if f"{name}:" not in comments] == []
    assert "still to be given: model_path, data_path, ckpt_output_dir" in run("config", "init", "--train-profile", str(path)).stdout
    assert "there already" in run("config", "init", "--train-profile", str(path), "--preset", "cpu", code=1).stderr
    path.write_text("train_args: {num_epochs: 0}")
    assert "num_epochs (profile)" in run("config", "init", "--train-profile", str(path), code=1).stderr
    assert "no preset" in run("config", "init", "--train-profile", str(tmp_path / "q.yaml"), "--preset", "tpu", code=1).stderr


@pytest.fixture
def trainer(tmp_path):
    """A trainer's interpreter that plays a run: three steps, then it waits until it is stopped, if it is told to."""
    attempt = tmp_path / "o" / "attempts" / "1"
    attempt.mkdir(parents=True)
    code = f"""
        #!{sys.executable}
        import json, os, pathlib, signal, sys
        assert sys.argv[1:] == ["-m", "posttrain_trainer", "train"], sys.argv
        asked, folder = json.loads(sys.stdin.readline()), pathlib.Path({str(attempt)!r})
        def say(**words):
            print(json.dumps(words), flush=True)
        def end(status):
            say(result=dict(status=status, steps=3, total_steps=9, loss=1.5, checkpoint_path="/there"))
            os._exit(0)
        signal.signal(signal.SIGTERM, lambda *_: end("stopped"))
        print("a library's words")
        say(attempt=str(folder))
        seed = asked["train_args"]["random_seed"]
        if seed == 1:
            say(error=dict(code="invalid_data", message="line 3 is bad", details=dict(errors=[dict(line=3, message="no messages")])))
            sys.exit(1)
        if seed == 2:
            sys.exit("it broke")
        (folder / "heartbeat.json").write_text(json.dumps(dict(phase="train", step=3, total_steps=9)))
        (folder / "metrics.jsonl").write_text(json.dumps(dict(step=3, loss=1.5)) + "\\n")
        (folder / "events.jsonl").write_text(json.dumps(dict(type="checkpoint", message="checkpoint step-000003 is complete")) + "\\n")
        if seed == 3:
            (folder / "up").write_text("")
            while True:
                if not os.read(0, 1):
                    (folder / "alone").write_text("")
                    os._exit(0)
        end("completed")
    """
    path = tmp_path / "python"
    path.write_text(textwrap.dedent(code).strip())
    path.chmod(0o755)
    return path, attempt


def words_for(trainer, seed):
    return ["train", *PATHS, "--random-seed", str(seed), "--trainer-python", str(trainer[0])]


def test_a_run_is_shown_and_summed_up(trainer):
    done = run(*words_for(trainer, 0))
    assert done.stdout == "completed after step 3 of 9, last loss 1.5000\n/there/model\n"
    assert "checkpoint step-000003 is complete" in done.stderr
    assert "step 3 of 9  loss 1.5000" in done.stderr
    assert json.loads(run(*words_for(trainer, 0), "--json").stdout)["steps"] == 3


def test_the_errors_of_a_run_are_told(trainer):
    refused = run(*words_for(trainer, 1), code=1).stderr
    assert "line 3 is bad" in refused
    assert "line 3: no messages" in refused
    assert f"{trainer[1]}/logs" in refused
    assert "ended without a result: it broke" in run(*words_for(trainer, 2), code=1).stderr
    assert "No such file" in run("train", *PATHS, "--trainer-python", "/nonexistent/python", code=1).stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_command_stops_the_run(trainer, how):
    process = subprocess.Popen([sys.executable, "-m", "posttrain_service", *words_for(trainer, 3)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (trainer[1] / "up").exists())
    process.send_signal(how)
    out, _ = process.communicate(timeout=120)
    if how is signal.SIGKILL:
        wait_for(lambda: (trainer[1] / "alone").exists())
    else:
        assert process.returncode == 130
        assert out.startswith("stopped after step 3 of 9")


def wait_for(condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


REPORT = {
    "rows": 9, "format": "messages", "invalid": 0, "samples": 7, "tokens": 100, "supervised_tokens": 25, "max_len": 30, "truncated": 1,
    "dropped": {"over_length": 2}, "dropped_lines": {"over_length": [4, 8]}, "warnings": ["mind this"],
    "lengths": [{"up_to": 16, "samples": 1}, {"up_to": 32, "samples": 6}],
    "packing": {"max_batch_len": 64, "micro_batches": 2, "efficiency": 1.0, "padded_efficiency": 0.5},
    "examples": [[[{"text": "say\x1b[2J [red]\n", "trained": False}, {"text": "hello", "trained": True}]]],
}  # fmt: skip


def shown(tmp_path, *, terminal):
    with (tmp_path / "out").open("w+") as file:
        colours = "standard" if terminal else None
        show_inspection(Console(file=file, width=300, force_terminal=terminal, color_system=colours, highlight=False), "f.jsonl", REPORT)
        file.seek(0)
        return file.read()


def test_an_inspection_is_plain_when_piped_and_coloured_in_a_terminal(tmp_path):
    plain, coloured = shown(tmp_path, terminal=False), shown(tmp_path, terminal=True)
    assert "\x1b" not in plain
    assert "say\\x1b[2J [red]\n[[hello]]" in plain
    for line in ("7 samples, 100 tokens", "25 tokens, 25.0%", "2 as over_length (lines 4, 8)", "up to        32  " + "#" * 40 + "  6", "warning: mind this"):
        assert line in plain
    assert "\x1b[1;32mhello\x1b[0m" in coloured
    assert "\x1b[2J" not in coloured
