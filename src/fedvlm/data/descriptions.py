"""Descriptions of classes: read sentences from files, or write them with a local text-generation model.

The model first writes questions about the data set and then answers each for every class, after Zhu et al., AWT,
NeurIPS 2024, as TOFA does. Decoding is greedy, so the same model writes the same sentences.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlm.data.table import EmbeddedTable, readable_name
from fedvlm.errors import SettingsError, unknown_name

KEYWORDS = "keywords"  # stands for the sentences shipped with the demo
Sentences = list[list[str]]  # by class


def read_common_descriptions(common: str, rows: EmbeddedTable) -> Sentences:
    """Read the sentences of every class; a class may have an empty list but must be in the file."""
    path = Path(common)
    if common == KEYWORDS:
        path = Path(__file__).parent / "demo" / "keywords.json"
        if rows.name != "demo":
            problem = f"descriptions = 'keywords' are those of the demo, and the data are {rows.name}"
            raise SettingsError(f"{problem}; name a JSON file of class names with their sentences")
    class_sentences = match_sentences(path, read_file(path), rows.classes)
    for name, sentences in zip(rows.classes, class_sentences, strict=True):
        if sentences is None:
            raise SettingsError(f"{path} lacks the class {name!r}; add it, with [] if it has no sentences")
    return [sentences or [] for sentences in class_sentences]


def read_client_descriptions(path: str, classes: Sequence[str]) -> dict[str, Sentences]:
    """Read the sentences of each client; a client need not describe every class."""
    tables = read_file(Path(path))
    by_client = {id: match_sentences(Path(path), table, classes) for id, table in sorted(tables.items())}
    return {id: [sentences or [] for sentences in by_class] for id, by_class in by_client.items()}


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the descriptions {path} cannot be read ({error.strerror}); name a JSON file") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f'{path} is no table; write {{"class": ["sentence", ...], ...}}')
    return content


def match_sentences(path: Path, table: Any, classes: Sequence[str]) -> list[list[str] | None]:
    """Return the sentences of each class, None where the file lacks it."""
    if not isinstance(table, Mapping):
        raise SettingsError(f'{path} holds {table!r:.60}; write {{"class": ["sentence", ...]}}')
    names = {readable_name(name): index for index, name in enumerate(classes)}
    out: list[list[str] | None] = [None] * len(classes)
    for name, sentences in table.items():
        if readable_name(name) not in names:
            raise unknown_name(f"class of {path}", name, classes)
        if not isinstance(sentences, list) or not all(isinstance(text, str) and text.strip() for text in sentences):
            problem = f"must be a list of non-empty strings, got {sentences!r:.60}"
            raise SettingsError(f"{path}: the sentences of {name!r} {problem}")
        out[names[readable_name(name)]] = [" ".join(sentence.split()) for sentence in sentences]
    return out


def texts_by_client(texts: Mapping[str, Tensor], ids: Iterable[str]) -> dict[str, Tensor]:
    """Return texts of one shape for every client; zeros for a client that provides none."""
    if not texts:
        return {}
    ids = list(ids)
    for id in texts:
        if id not in ids:
            raise unknown_name("client", id, ids)
    none = torch.zeros_like(next(iter(texts.values())))
    return {id: texts.get(id, none) for id in ids}


MAX_SENTENCE_WORDS = 15  # as in the paper, and short enough for every text tower
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
    """Write sentences for each class; a class without a usable answer has an empty list."""
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
    """Split into lines of words, without numbers and bullets."""
    bare = [re.sub(r"^[\s\d.):*•-]+", "", line).strip() for line in text.splitlines()]
    return [line for line in bare if re.search(r"\w\w", line)]


def split_sentences(text: str, name: str) -> list[str]:
    """Split into sentences that name their class and are short enough for a text tower."""
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
    """Load a causal language model of the transformers library from a folder; nothing is downloaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        safe = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **safe)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **safe)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        remedy = "name the folder of one, with config.json, its weights and its tokenizer"
        raise SettingsError(f"{folder} holds no text-generation model ({reason}); {remedy}") from error
    model.eval()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    room = getattr(model.config, "max_position_embeddings", 1 << 20)

    def write(prompt: str, max_tokens: int) -> str:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"][:, -max(1, room - max_tokens) :]
        with torch.inference_mode():
            greedy = {"max_new_tokens": max_tokens, "do_sample": False, "num_beams": 1, "pad_token_id": pad}
            done = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy)
        return str(tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True))

    return write
