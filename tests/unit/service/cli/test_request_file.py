"""Requests and train profiles out of files."""

import json

import pytest

from posttrain_service.cli.request import read_request, with_settings
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.jobs import JobRequest

PROFILE = """
model_path: instructlab/granite-7b-lab
data_path: {data}
ckpt_output_dir: /tmp/out
data_output_dir: /tmp/data
max_seq_len: 4096
max_batch_len: 10000
num_epochs: 2
effective_batch_size: 3840
save_samples: 250000
learning_rate: 2e-6
warmup_steps: 25
is_padding_free: true
random_seed: 42
nproc_per_node: 2
nnodes: 1
node_rank: 0
rdzv_id: 123
rdzv_endpoint: 127.0.0.1:12222
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    return path


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_a_request_is_taken_as_it_is(write):
    read = read_request(write('{"model": "m", "dataset": "file-1", "training": {"num_epochs": 2}}'))
    assert read.request == {"model": "m", "dataset": "file-1", "training": {"num_epochs": 2}}
    assert (read.uploads, read.notes) == ({}, [])


def test_a_train_profile_becomes_a_request(write, data):
    read = read_request(write(PROFILE.format(data="rows.jsonl")))
    assert read.uploads == {"dataset": data}
    request = JobRequest(**read.request, dataset="file-1")
    args = request.train_args(model_path="m", data_path="d", ckpt_output_dir="r")
    assert (request.model, request.devices, args.effective_batch_size, args.learning_rate) == (
        "instructlab/granite-7b-lab", 2, 3840, 2e-6,
    )  # fmt: skip
    for name in ("ckpt_output_dir", "data_output_dir", "rdzv_id", "rdzv_endpoint"):
        assert any(note.startswith(name) for note in read.notes), name


def test_sections_and_a_local_model(write, data, tmp_path):
    model = tmp_path / "models/tiny"
    model.mkdir(parents=True)
    text = json.dumps({"train_args": {"model_path": str(model), "data_path": str(data), "validation_data_path": str(data)}, "torch_args": {}})
    read = read_request(write(text))
    assert read.request["model"] == "tiny"
    assert set(read.uploads) == {"dataset", "validation_dataset"}
    assert any(note.startswith("model_path") for note in read.notes)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("- a", "no mapping"),
        ("a: [", "neither YAML nor JSON"),
        ("model_path: m", "lacks model_path or data_path"),
        ("model_path: m\ndata_path: gone.jsonl", "gone.jsonl is not a file"),
        ("model_path: m\ndata_path: rows.jsonl\nlr: 3", "unknown names: lr"),
        ("model_path: m\ntrain: {model_path: n}", "model_path twice"),
        ("!!python/object/apply:os.system [ls]", "neither YAML nor JSON"),
    ],
)
def test_what_is_neither(write, data, text, what):
    with pytest.raises(InvalidRequest, match=what):
        read_request(write(text))


def test_settings():
    request = {"model": "m", "training": {"num_epochs": 1}}
    changed = with_settings(request, ["training.num_epochs=3", "name=a=b", "adapter.rank=8", "training.shuffle=false"])
    assert changed == {"model": "m", "name": "a=b", "adapter": {"rank": 8}, "training": {"num_epochs": 3, "shuffle": False}}
    assert request["training"] == {"num_epochs": 1}
    for bad in ("x", "=1", "model.x=1"):
        with pytest.raises(InvalidRequest, match="--set"):
            with_settings(request, [bad])
