"""Sentences about the classes, written by a local text-generation model in two steps.

First it writes questions about the data set, then it answers each for every class; after Zhu et
al., AWT, NeurIPS 2024, as TOFA does. Greedy, so the same model writes the same sentences.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedvlm.data.table import readable_name
from fedvlm.errors import SettingsError

MAX_SENTENCE_WORDS = 15  # of a sentence: what the paper asks for, and short enough for every text tower
QUESTION_PROMPT = (
    "Here is {about}. Its categories include {classes}. Write {count} questions, one on each line, "
    "that ask how a category looks: its shape, colour, texture, parts or surroundings."
)
ANSWER_PROMPT = (
    "{question}\nWrite 3 or 4 sentences, each of fewer than {words} words, that say how a typical "
    'image of {name} looks. Each sentence starts with "The {name}" and names one thing to see.'
)
Writer = Callable[[str, int], str]  # a prompt and how many tokens to write at most


def write_descriptions(
    classes: Sequence[str],
    about: str,
    write: Writer,
    questions: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[str]]:
    """Sentences by class; a class the model has nothing to say about has an empty list."""
    report = progress or (lambda done, total: None)
    names = [readable_name(class_name) for class_name in classes]
    answer = write(QUESTION_PROMPT.format(about=about, classes=", ".join(names[:10]), count=questions), 40 * questions)
    question_list = split_lines(answer)[:questions] or ["What does it look like?"]
    out: dict[str, list[str]] = {}
    for done, name in enumerate(classes):
        class_sentences: list[str] = []
        for number, question in enumerate(question_list):
            prompt = ANSWER_PROMPT.format(question=question, words=MAX_SENTENCE_WORDS, name=readable_name(name))
            class_sentences += split_sentences(write(prompt, 8 * MAX_SENTENCE_WORDS), readable_name(name))
            report(done * len(question_list) + number + 1, len(classes) * len(question_list))
        out[name] = list(dict.fromkeys(class_sentences))
    return out


def split_lines(text: str) -> list[str]:
    """Lines of words, without the numbers and bullets before them."""
    bare = [re.sub(r"^[\s\d.):*•-]+", "", line).strip() for line in text.splitlines()]
    return [line for line in bare if re.search(r"\w\w", line)]


def split_sentences(text: str, name: str) -> list[str]:
    """Each names its class and is cut to a length that text towers read."""
    out = []
    for line in split_lines(text):
        for part in re.split(r"(?<=[.!?])\s+", line):
            words = part.split()[:MAX_SENTENCE_WORDS]
            if not re.search(r"\w\w", " ".join(words)):
                continue
            sentence = " ".join(words).rstrip(".!?,;: ")
            named = name in sentence.lower()
            out.append(sentence + "." if named else f"The {name}: {sentence}.")
    return out


def load_writer(folder: str | Path) -> Writer:
    """A causal language model of the transformers library in a folder; nothing is downloaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        safe = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **safe)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **safe)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise SettingsError(
            f"{folder} holds no text-generation model ({reason}); name the folder of one, with "
            "config.json, its weights and its tokenizer"
        ) from error
    model.eval()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    room = getattr(model.config, "max_position_embeddings", 1 << 20)

    def write(prompt: str, max_tokens: int) -> str:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"][:, -max(1, room - max_tokens) :]
        with torch.inference_mode():
            done = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=pad,
            )
        return str(tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True))

    return write
