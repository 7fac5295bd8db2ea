"""What latents are called, which texts they respond to, and by how much they are changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.concepts.naming import Concepts
from interpose.detectors.top_activating import TopActivating
from interpose.errors import FileError
from interpose.files.reading import read_json
from interpose.files.writing import write_whole
from interpose.render.frame import csv_text

if TYPE_CHECKING:
    from interpose.dialects.mi_crow.mechanistic.sae.sae import Sae


@dataclass(frozen=True)
class Concept:
    """A name, and how sure one is of it."""

    name: str
    score: float


@dataclass(frozen=True)
class NeuronText:
    """A token at which a latent fires: how strongly, the whole text, and which token of it, counted from its first."""

    score: float
    text: str
    token_idx: int
    token_str: str


class ConceptDictionary:
    """A name and a score for each latent.

    Args:
        n_size: how many latents there are.
        store: where `save` puts it by default.
    """

    def __init__(self, n_size: int, store: Any = None) -> None:
        self.n_size = n_size
        self.store = store
        self.concepts_map: dict[int, Concept] = {}

    def _there(self, index: int) -> int:
        if not 0 <= index < self.n_size:
            raise IndexError(f"index {index} out of bounds [0, {self.n_size}).")
        return index

    def add(self, index: int, name: str, score: float) -> None:
        """Name a latent."""
        self.concepts_map[self._there(index)] = Concept(name, float(score))

    def get(self, index: int) -> Concept | None:
        """What a latent is called; None if nobody has said."""
        return self.concepts_map.get(self._there(index))

    def get_many(self, indices: Sequence[int]) -> dict[int, Concept | None]:
        """The same of several."""
        return {index: self.get(index) for index in indices}

    def __len__(self) -> int:
        return len(self.concepts_map)

    def save(self, path: str | Path | None = None) -> Path:
        """Write ``concepts.json`` in a folder, by default that of the store."""
        folder = _folder(self.store if path is None else path)
        folder.mkdir(parents=True, exist_ok=True)
        concepts = {str(n): asdict(one) for n, one in sorted(self.concepts_map.items())}
        return write_whole(
            folder / "concepts.json", _json({"n_size": self.n_size, "concepts": concepts})
        )

    def load(self, path: str | Path | None = None) -> ConceptDictionary:
        """Read what `save` wrote into this one."""
        folder = _folder(self.store if path is None else path)
        self.concepts_map = type(self).from_json(folder / "concepts.json", self.n_size).concepts_map
        return self

    @classmethod
    def from_csv(
        cls, csv_filepath: str | Path, n_size: int, store: Any = None
    ) -> ConceptDictionary:
        """Names from lines ``neuron_idx,concept_name,score``; of several for a latent the best stays."""
        found = Concepts.read(csv_filepath)
        return cls._of(
            {n: (name, found.scores[n]) for n, name in found.concepts.items()}, n_size, store
        )

    @classmethod
    def from_json(
        cls, json_filepath: str | Path, n_size: int, store: Any = None
    ) -> ConceptDictionary:
        """Names by latent, as mi-crow writes them: an object for each, or a list of which the best stays."""
        data = read_json(Path(json_filepath))
        where = repr(str(json_filepath))
        by_unit = data.get("concepts", data) if isinstance(data, Mapping) else None
        if not isinstance(by_unit, Mapping):
            raise FileError(f"{where} has no names by latent.")
        found: dict[int, tuple[str, float | None]] = {}
        for unit, said in by_unit.items():
            try:
                each = [said] if isinstance(said, Mapping) else list(said)
                best = max(each, key=lambda one: float(one["score"]))
                found[int(unit)] = (str(best["name"]), float(best["score"]))
            except (TypeError, ValueError, KeyError) as error:
                raise FileError(
                    f"{where}, {unit!r}: a name and a score are needed, as {{'name': ..., 'score': ...}}."
                ) from error
        return cls._of(found, n_size, store)

    @classmethod
    def _of(
        cls, found: Mapping[int, tuple[str, float | None]], n_size: int, store: Any
    ) -> ConceptDictionary:
        made = cls(n_size, store)
        for unit, (name, score) in found.items():
            made.add(unit, name, 0.0 if score is None else score)
        return made

    @classmethod
    def from_llm(
        cls,
        neuron_texts: Sequence[Sequence[NeuronText]],
        n_size: int,
        store: Any = None,
        ask: Callable[[list[NeuronText]], tuple[str, float]] | None = None,
    ) -> ConceptDictionary:
        """Names by a function that reads a latent's texts and returns a name and a score; none is called by itself."""
        made = cls(n_size, store)
        for unit, texts in enumerate(neuron_texts):
            if texts:
                name, score = (ask or cls._generate_concept_names_llm)(list(texts))
                made.add(unit, name, score)
        return made

    @staticmethod
    def _generate_concept_names_llm(texts: list[NeuronText]) -> tuple[str, float]:
        raise NotImplementedError(
            "no language model is called by itself: give ask=, or write _generate_concept_names_llm in a subclass."
        )


class AutoencoderConcepts:
    """Names, texts and manipulations of an autoencoder's latents.

    Attributes:
        dictionary: the names.
        multiplication: what each latent is multiplied with, [latent]; one changes nothing.
        bias: what is then added to it, [latent]; zero changes nothing.
    """

    def __init__(self, sae: Sae) -> None:
        self.sae = sae
        self.dictionary: ConceptDictionary | None = None
        self.multiplication = torch.ones(sae.n_latents)
        self.bias = torch.zeros(sae.n_latents)
        self._top: dict[int, TopActivating] = {}
        self._ends: list[Callable[[], Any]] = []

    # Manipulations.

    def manipulate_concept(self, neuron_idx: int, scale: float = 1.0, bias: float = 0.0) -> None:
        """Multiply a latent, and add to it; the others stay as they are.

        Args:
            neuron_idx: which.
            scale: what to multiply it with.
            bias: what to add then, at every token.
        """
        if not 0 <= neuron_idx < self.sae.n_latents:
            raise IndexError(f"neuron_idx {neuron_idx} out of bounds [0, {self.sae.n_latents}).")
        self.multiplication[neuron_idx] = scale
        self.bias[neuron_idx] = bias

    def reset_manipulations(self) -> None:
        """Change nothing any more."""
        self.multiplication.fill_(1.0)
        self.bias.fill_(0.0)

    def get_manipulation_config(self) -> dict[int, dict[str, float]]:
        """What is changed, by latent: ``scale`` and ``bias``."""
        touched = ((self.multiplication != 1) | (self.bias != 0)).nonzero()[:, 0].tolist()
        return {
            unit: {"scale": float(self.multiplication[unit]), "bias": float(self.bias[unit])}
            for unit in touched
        }

    def manipulated(self, latents: Tensor) -> Tensor:
        """Latents [..., latent] with what is changed."""
        touched = list(self.get_manipulation_config())
        if not touched:
            return latents
        found = latents.clone()
        at = torch.tensor(touched)
        times, plus = (one[at].to(latents) for one in (self.multiplication, self.bias))
        found[..., touched] = latents[..., touched] * times + plus
        return found

    # Texts.

    def enable_text_tracking(self, top_k: int = 5, track_negative: bool = False) -> None:
        """Keep the texts at which each latent fires most, from now on, in whatever the language model runs.

        Args:
            top_k: how many of each.
            track_negative: those at which it fires least, too.
        """
        context = self.sae.context
        if context is None:
            raise ValueError(
                "text tracking needs a language model: lm.attach_sae(sae, layer_signature=...) first."
            )
        self.disable_text_tracking()
        view, layers = context.view, context.language_model.layers
        path = layers.path_of(self.sae.layer_signature)
        name = f"concepts{id(self)}"
        there = self.sae.engine.attach(view, layers.site_of(path), name=name)
        self._ends.append(there.detach)
        self._top = {
            sign: TopActivating(there.latents, k=top_k, sign=sign)
            for sign in ((1, -1) if track_negative else (1,))
        }
        for top in self._top.values():
            self._ends.append(view.register(top).remove)

    def disable_text_tracking(self) -> None:
        """Look at no further texts; what was found stays."""
        while self._ends:
            self._ends.pop()()

    def reset_top_texts(self) -> None:
        """Forget what was found."""
        for top in self._top.values():
            top.clear()

    def get_top_texts_for_neuron(
        self, neuron_idx: int, top_m: int | None = None
    ) -> list[NeuronText]:
        """Where a latent fires most strongly, the strongest first."""
        return self._texts(1, neuron_idx)[:top_m]

    def get_bottom_texts_for_neuron(
        self, neuron_idx: int, top_m: int | None = None
    ) -> list[NeuronText]:
        """Where it fires least."""
        return self._texts(-1, neuron_idx)[:top_m]

    def get_top_texts(self) -> dict[int, list[NeuronText]]:
        """Of every latent that ever fired, where it did so most strongly."""
        each = enumerate(self.get_all_top_texts())
        return {unit: texts for unit, texts in each if texts}

    def get_all_top_texts(self) -> list[list[NeuronText]]:
        """Of every latent, where it fires most strongly."""
        return self._all(1)

    def get_all_bottom_texts(self) -> list[list[NeuronText]]:
        """Of every latent, where it fires least."""
        return self._all(-1)

    def _texts(self, sign: int, neuron_idx: int) -> list[NeuronText]:
        if not 0 <= neuron_idx < self.sae.n_latents:
            raise IndexError(f"neuron_idx {neuron_idx} out of bounds [0, {self.sae.n_latents}).")
        return self._all(sign, [neuron_idx])[0]

    def _all(self, sign: int, units: Sequence[int] | None = None) -> list[list[NeuronText]]:
        units = range(self.sae.n_latents) if units is None else units
        top = self._top.get(sign)
        if top is None or not top.metadata:
            return [[] for _ in units]
        found, texts = top.result(), top.texts()
        return [
            [
                NeuronText(one["value"], texts[one["text"]], one["pos"], one["token"])
                for one in found.examples(unit)
                if sign < 0 or one["value"] > 0
            ]
            for unit in units
        ]

    def export_top_texts_to_json(self, filepath: str | Path) -> Path:
        """Write where each latent fires most strongly, as JSON."""
        return self._as_json(self.get_all_top_texts(), filepath)

    def export_bottom_texts_to_json(self, filepath: str | Path) -> Path:
        """Write where each latent fires least, as JSON."""
        return self._as_json(self.get_all_bottom_texts(), filepath)

    @staticmethod
    def _as_json(each: list[list[NeuronText]], filepath: str | Path) -> Path:
        said = {str(unit): list(map(asdict, texts)) for unit, texts in enumerate(each) if texts}
        return write_whole(filepath, _json(said))

    def export_top_texts_to_csv(self, filepath: str | Path) -> Path:
        """Write lines ``neuron_idx,text,score,token_str,token_idx``."""
        columns = ("text", "score", "token_str", "token_idx")
        rows = [
            {"neuron_idx": unit} | {name: getattr(one, name) for name in columns}
            for unit, texts in enumerate(self.get_all_top_texts())
            for one in texts
        ]
        return write_whole(filepath, csv_text(rows))

    # Names.

    def load_concepts_from_csv(self, csv_filepath: str | Path) -> None:
        """Take names from a CSV file: see `ConceptDictionary.from_csv`."""
        self.dictionary = ConceptDictionary.from_csv(csv_filepath, self.sae.n_latents)

    def load_concepts_from_json(self, json_filepath: str | Path) -> None:
        """Take names from a JSON file: see `ConceptDictionary.from_json`."""
        self.dictionary = ConceptDictionary.from_json(json_filepath, self.sae.n_latents)

    def generate_concepts_with_llm(
        self, ask: Callable[[list[NeuronText]], tuple[str, float]] | None = None
    ) -> None:
        """Take names from a function that reads the top texts: see `ConceptDictionary.from_llm`."""
        self.dictionary = ConceptDictionary.from_llm(
            self.get_all_top_texts(), self.sae.n_latents, ask=ask
        )


def _folder(where: Any) -> Path:
    if where is None:
        raise ValueError("say where: a folder, or a store that the dictionary is made with.")
    return Path(getattr(where, "base_path", where))


def _json(data: Any) -> str:
    import json

    return json.dumps(data, ensure_ascii=False, indent=1)
