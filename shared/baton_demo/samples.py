"""Training samples: conversations, plain documents and JSON answers drawn from the corpus."""

import json
from random import Random

from baton_demo.chat import BOS, END, EOS, ROLE_TOKENS, Segment, turn
from baton_demo.corpus import Corpus, Fact, UnknownQuestions
from baton_demo.phrasing import disturb, reword, scramble

Sample = list[list[Segment]]
"""Groups of segments. Between groups the positions may jump, as if a long text were there."""

_TOOL_ANSWER = "The tool has answered; a larger model would now explain its result."
_MAX_TURNS = 40
_KEYS = (
    "answer",
    "text",
    "name",
    "title",
    "summary",
    "result",
    "city",
    "location",
    "arguments",
    "query",
    "value",
    "id",
)
_PLAIN = ("{}\n", "{}\n\n", "Q: {}\nA: ", "Question: {}\nAnswer: ", "User: {}\nAssistant: ")


class Sampler:
    """Draws an endless sequence of samples, which depends only on the corpus and the seed."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus = corpus
        self.rng = Random(seed)
        self._weights = [len(fact.questions) ** 0.2 for fact in corpus.facts]

    def sample(self) -> Sample:
        kind = self.rng.random()
        if kind < 0.08:
            return self._document()
        if kind < 0.14:
            return self._plain_question()
        if kind < 0.18:
            return self._json_answer()
        if kind < 0.19:
            return self._tool_result()
        if kind < 0.25:
            return self._thread()
        if kind < 0.27:
            return self._pasted()
        return [self._opening(), *(self._exchange() for _ in range(1 if kind < 0.94 else self._turns()))]

    def _turns(self) -> int:
        """Return a log-uniform number of turns: the many distracting keys of long conversations break recall."""
        return int(2 * (_MAX_TURNS / 2) ** self.rng.random())

    def _fact(self) -> Fact:
        return self.rng.choices(self.corpus.facts, self._weights)[0]

    def _question(self, source: Fact | UnknownQuestions) -> str:
        question = source.draw_question(self.rng)
        if self.rng.random() < 0.4:
            return question
        question = reword(question, self.corpus.synonyms, self.rng)
        return disturb(scramble(question, self.corpus.fillers, self.rng), self.rng)

    def _opening(self) -> list[Segment]:
        opening = [Segment(BOS)]
        if self.rng.random() < 0.3:
            opening += turn("system", self.rng.choice(self.corpus.systems))
        elif self.rng.random() < 0.04:
            opening += turn("system", self.rng.choice(self.corpus.documents))
        return opening

    def _exchange(self, pasted: str = "") -> list[Segment]:
        is_unknown = self.rng.random() < 0.15
        source = self.corpus.unknown if is_unknown else self._fact()
        return turn("user", pasted + self._question(source)) + turn("assistant", source.answer)

    def _pasted(self) -> Sample:
        documents = self.rng.choices(self.corpus.documents, k=int(20 ** self.rng.random()))
        return [self._opening(), self._exchange(" ".join(documents) + "\n\n")]

    def _thread(self) -> Sample:
        exchanges = [
            turn("user", disturb(question, self.rng)) + turn("assistant", answer)
            for question, answer in self.rng.choice(self.corpus.threads)
        ]
        return [self._opening(), *exchanges]

    def _document(self) -> Sample:
        text = self.rng.choice(self.corpus.documents) if self.rng.random() < 0.6 else self._fact().answer
        return [[Segment(BOS), Segment(text + EOS, learn=True)]]

    def _plain_question(self) -> Sample:
        unknown = self.corpus.unknown
        if self.rng.random() < 0.2:
            return [[Segment(BOS + unknown.draw_stem(self.rng)), Segment(f" {unknown.ending}{EOS}", learn=True)]]
        source = unknown if self.rng.random() < 0.15 else self._fact()
        question = self.rng.choice(_PLAIN).format(source.draw_question(self.rng))
        # People type no space or line break after a question, so the model must write it.
        stem = question.rstrip()
        return [[Segment(BOS + stem), Segment(question[len(stem) :] + source.answer + EOS, learn=True)]]

    def _tool_result(self) -> Sample:
        call = json.dumps({"name": f"get_{self.rng.choice(_KEYS)}", "arguments": self._object(1)})
        exchange = [
            *turn("user", self._question(self.corpus.unknown)),
            *(Segment(segment.text) for segment in turn("assistant", call)),
            *turn("tool", json.dumps(self._object(2))),
            *turn("assistant", _TOOL_ANSWER),
        ]
        return [self._opening(), exchange]

    def _json_answer(self) -> Sample:
        """Return an answer as JSON. Only values and closings are learned, because a grammar forces the keys.

        The model does not see the schema of constrained decoding, so half of these questions do not mention JSON.
        """
        fact = self._fact()
        question = self._question(fact)
        if self.rng.random() < 0.5:
            question += self.rng.choice((" Answer in JSON.", " Reply with JSON.", " as JSON", " Give me JSON."))
        value = {self.rng.choice(_KEYS): fact.answer} if self.rng.random() < 0.6 else self._object(3)
        segments = [Segment("{")]
        for index, (key, item) in enumerate(value.items()):
            closing = "}" + END if index == len(value) - 1 else ","
            lead = " " if index else ""
            segments += [Segment(f'{lead}"{key}":'), Segment(f" {json.dumps(item)}{closing}", learn=True)]
        return [self._opening(), [*turn("user", question), Segment(ROLE_TOKENS["assistant"]), *segments]]

    def _object(self, size: int) -> dict[str, object]:
        return {key: self._value() for key in self.rng.sample(_KEYS, self.rng.randint(1, size))}

    def _value(self) -> object:
        nouns = self.corpus.unknown.nouns
        match self.rng.randrange(6):
            case 0:
                return self.rng.randint(0, 99)
            case 1:
                return self.rng.random() < 0.5
            case 2:
                return self.rng.choices(nouns, k=self.rng.randint(1, 3))
            case 3:
                return {self.rng.choice(_KEYS): self.rng.choice(nouns)}
            case _:
                return self.rng.choice(nouns)
