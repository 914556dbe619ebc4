"""The JSON commands: what they answer, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain_trainer import tools
from posttrain_trainer.contract.errors import InvalidArguments, InvalidData, ModelNotFound
from posttrain_trainer.contract.spec import LoraArguments
from posttrain_trainer.models.lora import add_lora
from posttrain_trainer.testing import tiny_model, tiny_rows


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []


def _tokens(model, rows):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]) for row in rows]


def test_inspect_counts(model, rows):
    lengths = _tokens(model, tiny_rows(20))
    report = tools.inspect({"data_path": str(rows), "model_path": str(model)})
    assert (report["rows"], report["samples"], report["tokens"]) == (20, 20, sum(lengths))
    assert report["max_len"] == max(lengths)
    assert 0 < report["supervised_tokens"] < report["tokens"]
    everything = tools.inspect({"data_path": str(rows), "model_path": str(model), "train_args": {"train_on": "all"}})
    assert everything["supervised_tokens"] > report["supervised_tokens"]
    short = tools.inspect({"data_path": str(rows), "model_path": str(model), "train_args": {"max_seq_len": 30}})
    assert short["samples"] == sum(length <= 30 for length in lengths)
    json.dumps([report, everything, short])


def test_inspect_names_bad_lines(model, rows):
    with rows.open("a") as file:
        file.write('{"messages": "nonsense"}\n')
    with pytest.raises(InvalidData) as caught:
        tools.inspect({"data_path": str(rows), "model_path": str(model)})
    assert [error["line"] for error in caught.value.details["errors"]] == [21]


def _train_args(model, rows, **changes):
    return {"model_path": str(model), "data_path": str(rows), "ckpt_output_dir": "never-made", "device": "cpu", **changes}


def test_estimate(model, rows):
    args = _train_args(model, rows, effective_batch_size=8, num_epochs=2)
    answer = tools.estimate({"train_args": args, "nproc": 1})
    assert (answer["parameters"], answer["trainable"]) == (106_816, 106_816)
    assert answer["steps"] == 6  # 8 + 8 + 4 rows, twice
    assert answer["tokens"] == 2 * sum(_tokens(model, tiny_rows(20)))
    packing = answer["packing"]
    assert 0 < packing["padded_efficiency"] < packing["efficiency"] == 1.0  # all twenty rows are one micro-batch
    memory = answer["memory"]
    assert memory["fits"] is True
    assert memory["total_bytes"] == memory["per_rank_bytes"]
    two = tools.estimate({"train_args": {**args, "lora": {"rank": 4}, "max_steps": 3}, "nproc": 2})
    assert (two["steps"], two["memory"]["total_bytes"]) == (3, 2 * two["memory"]["per_rank_bytes"])
    assert two["trainable"] < two["parameters"]
    assert two["tokens"] < answer["tokens"]
    json.dumps([answer, two])
    assert not os.path.exists("never-made")  # noqa: PTH110


def test_estimate_needs_no_weights(model, rows, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    assert tools.estimate({"train_args": _train_args(folder, rows)})["parameters"] == 106_816


def test_estimate_says_when_it_does_not_fit(model, rows, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100}))
    memory = tools.estimate({"train_args": _train_args(folder, rows)})["memory"]
    assert memory["fits"] is False
    assert memory["per_rank_bytes"] > 10**12


@pytest.mark.parametrize(
    ("command", "payload", "sentence"),
    [
        ("inspect", {"data_path": "x"}, "model_path: Field required"),
        ("estimate", {"train_args": {}, "nprocs": 2}, "nprocs: Extra inputs"),
        ("estimate", {"train_args": {"model_path": "m"}}, "data_path: Field required"),
        ("estimate", {"train_args": {}, "nproc": 0}, "nproc: .*greater than or equal to 1"),
        ("convert", {"source": "x"}, "target: Field required"),
        ("generate", {"model_path": "x", "prompts": "hello"}, "prompts: "),
    ],
)
def test_payloads_are_checked(command, payload, sentence):
    with pytest.raises(InvalidArguments, match=sentence):
        getattr(tools, command)(payload)


def _same_model(one, other):
    first, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (one, other))
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], tensor, rtol=0, atol=0)
    head, embedding = second.get_output_embeddings().weight, second.get_input_embeddings().weight
    assert (head is embedding) == first.config.tie_word_embeddings


def test_convert_copies_a_folder(model, tmp_path):
    target = tmp_path / "models" / "copy"
    assert tools.convert({"source": str(model), "target": str(target)}) == {"path": str(target), "parameters": 106_816}
    _same_model(model, target)
    old, new = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(target)
    assert new.chat_template == old.chat_template
    assert (new.pad_token_id, new.eos_token_id, new.bos_token_id) == (2, 2, 1)
    assert "local_files_only" not in json.loads((target / "tokenizer_config.json").read_text())
    assert [path.name for path in target.parent.iterdir()] == ["copy"]
    with pytest.raises(InvalidArguments, match="exists; remove it"):
        tools.convert({"source": str(model), "target": str(target)})


def _write_gguf(model, path):
    """The tiny model as a GGUF file, in llama.cpp's names and layout."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, tokenizer = hf.config, AutoTokenizer.from_pretrained(model)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens = known + [f"<unused{i}>" for i in range(config.vocab_size - len(known))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in hf.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:  # llama.cpp interleaves the halves that rotary embedding turns
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_convert_reads_gguf(model, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    _write_gguf(model, source / "tiny.gguf")
    target = tmp_path / "converted"
    assert tools.convert({"source": str(source), "target": str(target)})["parameters"] == 106_816
    _same_model(model, target)
    old, new = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(target)
    assert new.chat_template == old.chat_template
    assert (new.pad_token_id, new.eos_token_id, new.bos_token_id) == (2, 2, 1)
    for row in tiny_rows(6):
        texts = [tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for tokenizer in (old, new)]
        assert texts[0] == texts[1]
    generation = json.loads((target / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [({"a.txt": "x"}, "0 GGUF files"), ({"a.gguf": "x", "b.gguf": "x"}, "2 GGUF files"), (None, "does not exist")],
)
def test_convert_needs_one_source(tmp_path, content, sentence):
    source = tmp_path / "source"
    if content is not None:
        source.mkdir()
        for name, text in content.items():
            (source / name).write_text(text)
    with pytest.raises(ModelNotFound, match=sentence):
        tools.convert({"source": str(source), "target": str(tmp_path / "t")})
    assert not (tmp_path / "t").exists()


def test_a_converted_model_that_answers_wrongly_is_not_kept(model, tmp_path):
    verify = {"prompt": "question", "expect": "Paris", "max_new_tokens": 2}
    with pytest.raises(InvalidArguments, match="not with 'Paris'"):
        tools.convert({"source": str(model), "target": str(tmp_path / "models" / "t"), "verify": verify})
    assert list((tmp_path / "models").iterdir()) == []


def _greedy(model, tokenizer, prompt, steps):
    return tokenizer.decode(_greedy_tokens(model, tokenizer, prompt, steps), skip_special_tokens=True).strip()


def _ended(model, tokenizer, prompt, steps):
    return _greedy_tokens(model, tokenizer, prompt, steps)[-1] == tokenizer.eos_token_id


def _greedy_tokens(model, tokenizer, prompt, steps):
    """The slow way: the whole forward for each token."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(steps):
            token = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, token.view(1, 1)], dim=1)
            if token == tokenizer.eos_token_id:
                break
    return ids[0, start:]


def test_generate_is_greedy_with_and_without_adapter(model, tmp_path):
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)
    prompts = ["question 1", "name of the river"]
    request = {"model_path": str(model), "prompts": prompts, "max_new_tokens": 6}
    expected = [_greedy(base, tokenizer, prompt, 6) for prompt in prompts]
    answered = tools.generate(request)
    assert answered == {"answers": expected, "cut": [not _ended(base, tokenizer, prompt, 6) for prompt in prompts]}
    as_messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    assert tools.generate({**request, "prompts": as_messages}) == answered

    adapted = add_lora(base, LoraArguments(rank=4, alpha=64, target_modules=("q_proj", "down_proj")), seed=1)
    for name, parameter in adapted.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(tmp_path / "adapter")
    both = tools.generate({**request, "adapter_path": str(tmp_path / "adapter"), "with_base": True})
    assert both["answers"] == [_greedy(adapted.eval(), tokenizer, prompt, 6) for prompt in prompts]
    assert both["answers"] != both["base_answers"] == expected


def test_generate_refuses(model, tmp_path):
    request = {"model_path": str(model), "prompts": ["x"]}
    with pytest.raises(ModelNotFound, match="holds no adapter"):
        tools.generate({**request, "adapter_path": str(tmp_path)})
    with pytest.raises(InvalidArguments, match="with_base: without adapter_path"):
        tools.generate({**request, "with_base": True})
    plain = tiny_model(tmp_path / "plain", chat_template=None, layers=1)
    with pytest.raises(InvalidArguments, match="no chat template"):
        tools.generate({"model_path": str(plain), "prompts": ["x"]})
    assert len(tools.generate({"model_path": str(plain), "prompts": ["x"], "chat_template": "chatml", "max_new_tokens": 1})["answers"]) == 1


@pytest.mark.slow
def test_commands_speak_json_on_stdout_alone(model, rows):
    """The seam the service uses: a process whose stdout is one JSON object, whatever libraries print."""

    def ask(command, payload):
        done = subprocess.run(
            [sys.executable, "-m", "posttrain_trainer", command], input=json.dumps(payload), capture_output=True, text=True, timeout=140
        )
        return done.returncode, json.loads(done.stdout)

    code, answer = ask("generate", {"model_path": str(model), "prompts": ["x"], "max_new_tokens": 1})
    assert (code, len(answer["answers"])) == (0, 1)
    code, answer = ask("estimate", {"train_args": _train_args("/nowhere", rows)})
    assert (code, answer["error"]["code"]) == (1, "model_not_found")
