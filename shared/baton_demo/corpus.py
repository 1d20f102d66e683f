"""The corpus: plain text files in the folder `corpus`, parsed into facts, threads and unknown questions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from baton_demo.phrasing import FRAMES, phrase

CORPUS_DIR = Path(__file__).parent / "corpus"


class CorpusError(ValueError):
    """A corpus file does not have its format; the message names the file."""


@dataclass(frozen=True)
class Fact:
    """One answer and the questions that it answers."""

    written: tuple[str, ...]
    framed: tuple[str, ...]
    answer: str

    @property
    def questions(self) -> tuple[str, ...]:
        return self.written + self.framed

    def draw_question(self, rng: Random) -> str:
        pools = [pool for pool in (self.written, self.framed) if pool]
        return rng.choice(rng.choice(pools))


@dataclass(frozen=True)
class UnknownQuestions:
    """Messages that the model cannot answer, and the one polite reply to all of them."""

    frames: tuple[str, ...]
    nouns: tuple[str, ...]
    lines: tuple[str, ...]
    stems: tuple[str, ...]
    answer: str
    ending: str

    def draw_question(self, rng: Random) -> str:
        if rng.random() < 0.25:
            return rng.choice(self.lines)
        if rng.random() < 0.05:
            return " ".join(rng.choices(self.nouns, k=rng.randint(2, 12)))
        return self._fill(rng.choice(self.frames), rng)

    def draw_stem(self, rng: Random) -> str:
        """Return the start of a sentence for a plain completion to finish."""
        return self._fill(rng.choice(self.stems), rng)

    def _fill(self, frame: str, rng: Random) -> str:
        return frame.format(*rng.choices(self.nouns, k=frame.count("{}")))


@dataclass(frozen=True)
class Corpus:
    facts: tuple[Fact, ...]
    threads: tuple[tuple[tuple[str, str], ...], ...]
    documents: tuple[str, ...]
    systems: tuple[str, ...]
    synonyms: dict[str, tuple[str, ...]]
    fillers: tuple[str, ...]
    unknown: UnknownQuestions

    @classmethod
    def load(cls, folder: Path = CORPUS_DIR) -> "Corpus":
        facts = [_fact(path, block) for path in sorted(folder.glob("facts_*.txt")) for block in _blocks(path)]
        threads = folder / "threads.txt"
        documents = folder / "documents.txt"
        return cls(
            facts=tuple(facts),
            threads=tuple(_thread(threads, block) for block in _blocks(threads)),
            documents=tuple(" ".join(block) for block in _blocks(documents)),
            systems=tuple(line for block in _blocks(folder / "systems.txt") for line in block),
            synonyms=_synonyms(folder / "synonyms.txt"),
            fillers=tuple(word for block in _blocks(folder / "fillers.txt") for line in block for word in line.split()),
            unknown=_unknown_questions(folder / "strangers.txt"),
        )

    def texts(self) -> Iterator[str]:
        """Yield every text once, to train the tokenizer."""
        for fact in self.facts:
            yield fact.answer
            yield from fact.questions
        for thread in self.threads:
            for question, answer in thread:
                yield from (question, answer)
        yield from self.documents
        yield from self.systems
        for word, others in self.synonyms.items():
            yield from (f"{word} {other}" for other in others)
        yield " ".join(self.fillers)
        yield from self.unknown.frames
        yield from self.unknown.stems
        yield self.unknown.ending
        yield from self.unknown.lines
        yield from (f"a {noun}" for noun in self.unknown.nouns)


def _blocks(path: Path) -> Iterator[list[str]]:
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            yield lines


def _tagged(path: Path, line: str, tags: set[str]) -> tuple[str, str]:
    tag, colon, text = line.partition(": ")
    if not colon or tag not in tags:
        raise CorpusError(f"{path.name}: expected one of {sorted(tags)} before a colon in {line!r}")
    return tag, text


def _fact(path: Path, block: list[str]) -> Fact:
    lines = [_tagged(path, line, {*FRAMES, "q", "a"}) for line in block]
    answers = [text for tag, text in lines if tag == "a"]
    if len(answers) != 1 or len(lines) < 2:
        raise CorpusError(f"{path.name}: a fact has questions and one answer, not {block!r}")
    framed = [question for tag, text in lines if tag in FRAMES for question in phrase(tag, text)]
    written = [text for tag, text in lines if tag == "q"]
    return Fact(tuple(written), tuple(dict.fromkeys(framed)), answers[0])


def _thread(path: Path, block: list[str]) -> tuple[tuple[str, str], ...]:
    lines = [_tagged(path, line, {"q", "a"}) for line in block]
    if [tag for tag, _ in lines] != ["q", "a"] * (len(lines) // 2):
        raise CorpusError(f"{path.name}: a thread alternates q and a, unlike {block!r}")
    texts = [text for _, text in lines]
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def _synonyms(path: Path) -> dict[str, tuple[str, ...]]:
    lines = [line.partition(": ") for block in _blocks(path) for line in block]
    return {word: tuple(others.split(", ")) for word, _, others in lines}


def _unknown_questions(path: Path) -> UnknownQuestions:
    lines = [
        _tagged(path, line, {"answer", "ending", "frame", "line", "noun", "stem"})
        for block in _blocks(path)
        for line in block
    ]
    pick = {tag: tuple(text for other, text in lines if other == tag) for tag, _ in lines}
    nouns = tuple(noun for line in pick["noun"] for noun in line.split(", "))
    return UnknownQuestions(pick["frame"], nouns, pick["line"], pick["stem"], pick["answer"][0], pick["ending"][0])
