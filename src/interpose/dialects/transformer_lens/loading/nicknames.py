"""Names of published models as TransformerLens's users write them, and the repositories that they mean.

A nickname is the last part of the repository's name in any case, with or without ``-hf``; or it is listed in `_OTHERS`.
"""

from __future__ import annotations

import re

_REPOSITORIES = {
    "01-ai": "Yi-34B Yi-34B-Chat Yi-6B Yi-6B-Chat",
    "EleutherAI": "gpt-j-6B gpt-neo-1.3B gpt-neo-125M gpt-neo-2.7B gpt-neox-20b",
    "ai-forever": "mGPT",
    "allenai": "OLMo-1B-hf OLMo-7B-hf Olmo-3-32B-Think Olmo-3-7B-Instruct Olmo-3-7B-Think Olmo-3.1-32B-Instruct"
    " Olmo-3.1-32B-Think",
    "bigcode": "santacoder",
    "bigscience": "bloom-1b1 bloom-1b7 bloom-3b bloom-560m bloom-7b1",
    "codellama": "CodeLlama-7b-Instruct-hf CodeLlama-7b-Python-hf",
    "facebook": "hubert-base-ls960 opt-1.3b opt-125m opt-13b opt-2.7b opt-30b opt-6.7b opt-66b wav2vec2-base"
    " wav2vec2-large",
    "google": "gemma-2-27b gemma-2-27b-it gemma-2-2b gemma-2-2b-it gemma-2-9b gemma-2-9b-it gemma-2b gemma-2b-it"
    " gemma-3-12b-it gemma-3-12b-pt gemma-3-1b-it gemma-3-1b-pt gemma-3-270m gemma-3-270m-it gemma-3-27b-it"
    " gemma-3-27b-pt gemma-3-4b-it gemma-3-4b-pt gemma-7b gemma-7b-it medgemma-27b-it medgemma-27b-text-it"
    " medgemma-4b-it medgemma-4b-pt",
    "google-bert": "bert-base-cased bert-base-uncased bert-large-cased bert-large-uncased",
    "google-t5": "t5-base t5-large t5-small",
    "meta-llama": "Llama-2-13b-chat-hf Llama-2-13b-hf Llama-2-70b-chat-hf Llama-2-7b-chat-hf Llama-2-7b-hf",
    "microsoft": "phi-1 phi-1_5 phi-2 phi-4",
    "mistralai": "Mistral-Nemo-Base-2407",
    "openai": "gpt-oss-20b",
    "stabilityai": "stablelm-base-alpha-3b stablelm-base-alpha-7b stablelm-tuned-alpha-3b stablelm-tuned-alpha-7b",
    "stanford-crfm": "alias-gpt2-small-x21 arwen-gpt2-medium-x21 battlestar-gpt2-small-x49 beren-gpt2-medium-x49"
    " caprica-gpt2-small-x81 celebrimbor-gpt2-medium-x81 darkmatter-gpt2-small-x343 durin-gpt2-medium-x343"
    " eowyn-gpt2-medium-x777 expanse-gpt2-small-x777",
}
_OTHERS = {
    "allenai/OLMo-2-0425-1B": "olmo-2-1b",
    "allenai/OLMo-2-1124-7B": "olmo-2-7b",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
    "codellama/CodeLlama-7b-hf": "CodeLlamallama-2-7b",
    "distilgpt2": "distillgpt2 distill-gpt2 distil-gpt2 gpt2-xs",
    "gpt2": "gpt2-small",
    "EleutherAI/gpt-j-6B": "gpt-j gptj",
    "EleutherAI/gpt-neo-125M": "gpt-neo-small neo-small neo",
    "EleutherAI/gpt-neo-1.3B": "gpt-neo-medium neo-medium",
    "EleutherAI/gpt-neo-2.7B": "gpt-neo-large neo-large",
    "EleutherAI/gpt-neox-20b": "gpt-neox neox",
    "EleutherAI/pythia-70m": "pythia",
    "EleutherAI/pythia-70m-v0": "pythia-v0",
    "Qwen/Qwen-1_8B": "qwen-1.8b",
    "Qwen/Qwen-1_8B-Chat": "qwen-1.8b-chat",
    "Qwen/QwQ-32B-Preview": "qwen-32b-preview",
    "facebook/opt-125m": "opt-small opt",
    "facebook/opt-1.3b": "opt-medium",
    "facebook/opt-2.7b": "opt-large",
    "facebook/opt-6.7b": "opt-xl",
    "facebook/opt-13b": "opt-xxl",
    "facebook/opt-30b": "opt-xxxl",
    "facebook/opt-66b": "opt-xxxxl",
    "facebook/wav2vec2-base": "w2v2-base",
    "facebook/wav2vec2-large": "w2v2-large",
    "meta-llama/Llama-2-70b-chat-hf": "meta-llama-2-70b-chat-hf",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-instruct",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral mixtral-8x7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-instruct mixtral-8x7b-instruct",
    "openai/gpt-oss-20b": "gpt-oss",
    "roneneldan/TinyStories-1Layer-21M": "tiny-stories-1l-21m",
    "roneneldan/TinyStories-2Layers-33M": "tiny-stories-2l-33m",
    "roneneldan/TinyStories-Instuct-1Layer-21M": "tiny-stories-instruct-1l-21m",  # as it is spelled there
    "roneneldan/TinyStories-Instruct-2Layers-33M": "tiny-stories-instruct-2l-33m",
    "stabilityai/stablelm-base-alpha-3b": "stablelm-base-3b",
    "stabilityai/stablelm-base-alpha-7b": "stablelm-base-7b",
    "stabilityai/stablelm-tuned-alpha-3b": "stablelm-tuned-3b",
    "stabilityai/stablelm-tuned-alpha-7b": "stablelm-tuned-7b",
    "swiss-ai/Apertus-8B-2509": "apertus-8b apertus",
    "swiss-ai/Apertus-8B-Instruct-2509": "apertus-8b-instruct apertus-instruct",
}
_SIZES = {  # of Pythia, which were counted otherwise at first
    "19m": "70m", "125m": "160m", "350m": "410m", "800m": "1b",
    "1.3b": "1.4b", "2.7b": "2.8b", "6.7b": "6.9b", "13b": "12b",
}  # fmt: skip
_STANFORD = {
    "small": ["alias", "battlestar", "caprica", "darkmatter", "expanse"],
    "medium": ["arwen", "beren", "celebrimbor", "durin", "eowyn"],
}
_SEEDS = (21, 49, 81, 343, 777)
_WIDTHS = {"6": 768, "8": 1024, "10": 1280, "12": 1536}


def on_hub(name: str) -> str:
    """The repository, file or folder that a name means; a name that is no nickname comes back as it is."""
    plain = name.lower()
    if plain in _KNOWN:
        return _KNOWN[plain]
    pythia = re.fullmatch(
        r"(?:eleutherai/)?pythia-([\d.]+[mb])((?:-deduped|-seed\d)?(?:-v0)?)", plain
    )
    if pythia is not None:
        return f"EleutherAI/pythia-{_SIZES.get(pythia[1], pythia[1])}{pythia[2]}"
    qwen = re.fullmatch(r"qwen([\d.]*)-([\d.]+)b((?:-[a-z]+)?)", plain)
    if qwen is not None:
        return f"Qwen/Qwen{qwen[1]}-{qwen[2]}B{qwen[3].title()}"
    stories = re.fullmatch(r"tiny-stories-(instruct-)?(\d+)m", plain)
    if stories is not None:
        return f"roneneldan/TinyStories-{(stories[1] or '').title()}{stories[2]}M"
    stanford = re.fullmatch(
        r"(?:stanford-gpt2|gpt2-stanford|gpt2-mistral|gpt2)-(small|medium)-(?:small-)?([a-e])",
        plain,
    )
    if stanford is not None:
        number = ord(stanford[2]) - ord("a")
        first = _STANFORD[stanford[1]][number]
        return f"stanford-crfm/{first}-gpt2-{stanford[1]}-x{_SEEDS[number]}"
    return name


def own_file(name: str) -> str | None:
    """The repository of a model whose weights are a file of TransformerLens's own; None for any other."""
    if name.startswith(("NeelNanda/", "ArthurConmy/redwood", "Baidicoot/Othello")):
        return name
    plain = name.lower()
    special = {"redwood_attn_2l": "ArthurConmy/redwood_attn_2l"}
    special["othello-gpt"] = "Baidicoot/Othello-GPT-Transformer-Lens"
    for demo in ("demo", "2l-demo", "2l-induction-demo", "2l-shortformer-6b-big-lr"):
        special[f"attn-only-{demo}"] = "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"
    for layers, version in (
        ("1", 9),
        ("2", 10),
        ("4", 11),
        ("6", 13),
        ("8", 21),
        ("10", 22),
        ("12", 23),
    ):
        for end in ("old", "pile"):
            special[f"solu-{layers}l-{end}"] = f"NeelNanda/SoLU_{layers}L_v{version}_old"
    match = re.fullmatch(
        r"(gelu|solu|attn-only)-(\d+)l(-new|-c4-code|-wiki|-wiki-finetune|-finetune)?", plain
    )
    if plain in special or match is None:
        return special.get(plain)
    kind = {"gelu": "GELU", "solu": "SoLU", "attn-only": "Attn_Only"}[match[1]]
    tuned = match[3] not in (None, "-new", "-c4-code")
    size = f"{match[2]}L{_WIDTHS.get(match[2], 512)}W"
    return f"NeelNanda/{kind}_{size}_{'Wiki_Finetune' if tuned else 'C4_Code'}"


def checkpoints_of(name: str) -> list[int] | None:
    """The steps of training at which a repository has checkpoints; None if none are known."""
    if name.startswith("EleutherAI/pythia"):
        early = [] if name.endswith("-v0") else [0, *(2**n for n in range(10))]
        return [*early, *range(1000, 143_001, 1000)]
    if name.startswith("stanford-crfm/"):
        steps = [*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100)]
        return [*steps, *range(20_000, 400_001, 1000)]
    return None


def revision(name: str, index: int | None, value: int | None) -> str | None:
    """The revision of a repository that has a checkpoint of training; None for the last.

    Args:
        name: the repository.
        index: the how-manieth checkpoint.
        value: or the step that it was saved at.
    """
    if index is None and value is None:
        return None
    steps = checkpoints_of(name)
    if steps is None:
        raise ValueError(f"no checkpoints of training are known of {name!r}; give revision=...")
    label = "checkpoint-" if name.startswith("stanford-crfm/") else "step"
    if value is None:
        assert index is not None
        value = steps[index]
    if value not in steps:
        near = min(steps, key=lambda step: abs(step - value))
        raise ValueError(f"{name!r} has no checkpoint {value}; the nearest is {near}.")
    return f"{label}{value}"


def _plain(tail: str) -> str:
    return tail.lower().removesuffix("-hf")


_KNOWN = {
    **{
        nickname: f"{owner}/{tail}"
        for owner, tails in _REPOSITORIES.items()
        for tail in tails.split()
        for nickname in (_plain(tail), tail.lower())
    },
    **{
        nickname.lower(): repository
        for repository, nicknames in _OTHERS.items()
        for nickname in nicknames.split()
    },
}
