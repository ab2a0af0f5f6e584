"""A byte-pair vocabulary in CLIP's form, learnt from the captions."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer

from .captions import TEMPLATES

END = "</w>"  # ends a word
VOCABULARY = 4096
Pair = tuple[str, str]


def make_tokenizer(phrases: Iterable[str]) -> CLIPTokenizer:
    letters = sorted(ByteLevel.alphabet())
    special = ["<|startoftext|>", "<|endoftext|>"]
    words = Counter(
        word
        for phrase in phrases
        for template in ("{}", *TEMPLATES)
        for word in re.findall(r"[a-z]+|[0-9]", template.format(phrase))  # as CLIP splits text
    )
    merges = learn_merges(words, VOCABULARY - 2 * len(letters) - len(special))
    # All byte symbols come first, so that any text can be encoded, also one never seen here.
    tokens = [*letters, *(letter + END for letter in letters)]
    tokens += [first + right for first, right in merges]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *special]))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=32)


def learn_merges(words: Counter[str], max_merges: int) -> list[Pair]:
    """The most frequent pair of neighbours first, of equals the first by alphabet."""
    split = {word: [*word[:-1], word[-1] + END] for word in words}
    count: Counter[Pair] = Counter()
    holders: dict[Pair, set[str]] = defaultdict(set)  # words in which a pair may occur
    for word, symbols in split.items():
        for pair in pairwise(symbols):
            count[pair] += words[word]
            holders[pair].add(word)
    merges: list[Pair] = []
    while len(merges) < max_merges and (top := max(count.values(), default=0)):
        best = min(pair for pair, times in count.items() if times == top)
        merges.append(best)
        for word in holders.pop(best):
            for pair in pairwise(split[word]):
                count[pair] -= words[word]
            split[word] = merged(split[word], best)
            for pair in pairwise(split[word]):
                count[pair] += words[word]
                holders[pair].add(word)
    return merges


def merged(symbols: list[str], pair: Pair) -> list[str]:
    done: list[str] = []
    for symbol in symbols:
        # a piece that was just merged is longer than the left one, so "aaa" gives "aa", "a"
        if done and (done[-1], symbol) == pair:
            done[-1] += symbol
        else:
            done.append(symbol)
    return done
