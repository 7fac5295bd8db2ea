"""A byte-level BPE tokenizer: every word of the training text is one token, and anything else still has tokens.

Merges are learned for a small vocabulary only; then every word that the text uses is added whole, and whole words win
(`ignore_merges`). So no vocabulary is spent on pieces of names, and there is no unknown token.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.words import NAMES, SURNAMES
from training.world import COUNTRIES, LANDMARKS

END_OF_TEXT = "<|endoftext|>"
_MERGED = 640  # tokens that merging may make, the 256 bytes included
_SPLIT = r"'s| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"


def _proper_nouns() -> set[str]:
    """Words that must be one token with and without a space in front, wherever the text happens to put them."""
    names = {word for land in COUNTRIES for word in (land.name, land.capital, land.language)}
    names |= {word for landmark in LANDMARKS for word in (landmark.name, landmark.city)}
    words = {word for name in names for word in re.findall(r"[A-Za-z]+", name)}
    return words | set(NAMES) | set(SURNAMES)


def build(texts: Iterable[str]) -> Tokenizer:
    """Train on the texts and add their words whole.

    Args:
        texts: A sample of the text, large enough to hold every word.
    """
    texts = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGED,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    split = tokenizer.pre_tokenizer.pre_tokenize_str
    words = Counter(word for text in texts for word, _ in split(text))
    for noun in _proper_nouns():
        words.update((noun, f"Ġ{noun}"))
    for number in range(100):
        words.update((f"{number:02}", f"Ġ{number:02}", f"{number % 10}", f"Ġ{number % 10}"))
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for word in sorted(words):
        vocabulary.setdefault(word, len(vocabulary))
    state["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(state))


def save(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(folder)` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
