"""A local language model describes classes, and what it writes is a file of descriptions."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.data.descriptions import (
    MAX_SENTENCE_WORDS,
    load_writer,
    match_sentences,
    read_file,
    split_lines,
    split_sentences,
    write_descriptions,
)
from fedvlm.errors import SettingsError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random causal language model of sixty words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["<unk>", "<eos>", ".", "The", "bird", *(f"word{i}" for i in range(55))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=60, n_positions=256, n_embd=16, n_layer=1, n_head=2, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_questions_come_first_and_every_class_answers_each():
    prompts = []

    def write(prompt, max_tokens):
        prompts.append(prompt)
        if "questions" in prompt:
            return "1. What colour is it?\n2) Where does it live?\n\n- And more?"
        return "The bird has wings. The bird is small!\n* it sings"

    described = write_descriptions(["bird", "Sea_Animal"], "a zoo", write, questions=2)
    assert len(prompts) == 1 + 2 * 2
    assert "a zoo" in prompts[0] and "bird, sea animal" in prompts[0]
    assert prompts[1].startswith("What colour is it?")
    assert prompts[2].startswith("Where does it live?")
    assert described["bird"] == ["The bird has wings.", "The bird is small.", "The bird: it sings."]
    assert described["Sea_Animal"][0] == "The sea animal: The bird has wings."


def test_long_sentences_are_cut_and_empty_ones_left_out():
    long = "The owl " + "very " * 40 + "big."
    assert len(split_sentences(long, "owl")[0].split()) == MAX_SENTENCE_WORDS
    assert split_sentences("...\n 1.\n--", "owl") == []
    assert split_lines("12. a\n3. an owl") == ["an owl"]


def test_a_model_that_says_nothing_leaves_the_template():
    assert write_descriptions(["owl"], "x", lambda prompt, max_tokens: "") == {"owl": []}


def test_a_tiny_model_writes_a_file_that_a_run_reads(tmp_path, tiny):
    for name in ("bird", "owl"):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "zoo" / name / "a.png")
    zoo = str(tmp_path / "zoo")
    out = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in out:
        done = CliRunner().invoke(
            app, ["describe", zoo, "--model", str(tiny), "--output", str(path), "--questions", "1"]
        )
        assert done.exit_code == 0, done.output
    assert out[0].read_bytes() == out[1].read_bytes()  # greedy: the same sentences
    content = read_file(out[0])
    classes = list(content)
    assert classes == ["bird", "owl"]
    assert all(class_sentences is not None for class_sentences in match_sentences(out[0], content, classes))
    assert any(json.loads(out[0].read_text()).values())


def test_a_folder_without_a_model_is_said(tmp_path):
    with pytest.raises(SettingsError, match="holds no text-generation model"):
        load_writer(tmp_path)
