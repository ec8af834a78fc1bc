"""Texts with facts to find: the grammar, the facts and the builder of exactly sized haystacks.

Pure Python; imports only the standard library, so that training, `longfill demo` and `longfill eval` share it.
Invariant: text plus any question of a haystack, plus `reserve`, is exactly `context` tokens long.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

CODE_DIGITS = 5


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# A name is one adjective and one noun: 64 x 64 = 4,096 names, each half of a name shared by many others.
ADJECTIVES = _words(
    "amber ancient arctic ashen azure bitter bold brazen bright brisk bronze burning calm cobalt copper coral "
    "crimson crooked crystal dancing daring distant dusky eager emerald faded fearless fiery frozen gentle gilded "
    "golden grim hidden hollow humble iron ivory jade jolly lonely lucky marble mellow misty mossy nimble noble "
    "opal patient proud quiet ragged restless rusty scarlet shining silent silver sleepy stormy velvet wandering "
    "wild"
)
NOUNS = _words(
    "Badger Basilisk Bison Buzzard Caribou Cheetah Cobra Condor Cormorant Coyote Crane Cricket Dolphin Dragon "
    "Egret Falcon Ferret Finch Fox Gazelle Gecko Griffin Hare Hawk Hedgehog Heron Hornet Hydra Ibex Ibis Jackal "
    "Jaguar Kestrel Kraken Lark Lemur Leopard Lynx Magpie Mammoth Manta Marten Moose Narwhal Ocelot Osprey Otter "
    "Owl Panther Pelican Phoenix Puffin Puma Raven Salmon Sparrow Stork Tapir Tiger Toucan Viper Walrus Weasel "
    "Wolf"
)

FACT_FORMS = (
    "The access code of {name} is {code}.",
    "Remember that the access code of {name} is {code}.",
    "Note: {name} has the access code {code}.",
    "To open the gate, {name} must use the access code {code}.",
)
QUESTION_FORMS = (
    "What is the access code of {name}?",
    "Tell me the access code of {name}.",
    "Which access code does {name} have?",
)
ANSWER_CUE = "Answer:"

_PLACES = _words(
    "river mill harbor market tower garden bridge valley forest castle village library lake meadow station temple "
    "island desert orchard cellar"
)
_THINGS = _words(
    "lamp rope basket letter map boat barrel candle bell wagon kettle mirror ladder blanket drum coin key stone "
    "bottle hammer clock carpet flute saddle"
)
_PEOPLE = _words(
    "baker sailor teacher farmer weaver doctor miller painter soldier merchant singer hunter potter tailor judge "
    "captain shepherd gardener"
)
_QUALITIES = _words(
    "old small large heavy new broken clean dark warm cold narrow tall green red blue white yellow round empty full"
)
_VERBS = _words(
    "carried found lost painted repaired sold bought moved cleaned hid admired borrowed counted dropped forgot"
)
_TIMES = _words("morning evening winter summer spring autumn night week month year")
_UNITS = _words("steps miles coins days bricks trees houses pages")

# The slots of a filler sentence: `number`, `word` (an unknown word, spelled in bytes) and `name` (a name that no
# fact of the text uses) are drawn by `FillerGrammar`; the others are drawn from the lists above.
FILLER_FORMS = (
    "The {quality} {thing} was near the {place}.",
    "Every {time} the {person} walked to the {place}.",
    "The {person} {verb} a {quality} {thing} in the {place}.",
    "There is a {quality} {place} behind the {quality2} {place2}.",
    "In the {time}, the {person} and the {person2} {verb} the {thing}.",
    "Nobody knows why the {person} {verb} the {quality} {thing}.",
    "It was a {quality} {time}, and the {place} was {quality2}.",
    "The {place} is {number} {unit} from the {place2}.",
    "The {person} {verb} {number} {unit} last {time}.",
    "They say the {quality} {place} has {number} {unit}.",
    "In {number}, a {person} named {word} {verb} this {thing}.",
    "Some people call the {place} {word}.",
    "Once, {name} slept near the {quality} {place}.",
    "The {person} said that {name} likes the {place}.",
    "When the {time} came, the {person} was already at the {place}, with a {thing}.",
    "But the {thing} of the {person} was not as {quality} as the {thing2}.",
)
_SLOTS: dict[str, tuple[str, ...]] = {
    "place": _PLACES,
    "place2": _PLACES,
    "thing": _THINGS,
    "thing2": _THINGS,
    "person": _PEOPLE,
    "person2": _PEOPLE,
    "quality": _QUALITIES,
    "quality2": _QUALITIES,
    "verb": _VERBS,
    "time": _TIMES,
    "unit": _UNITS,
}
# Words that are one token each; a sentence made of them fills the last gap of a text to the token.
_PADDING = ("and", "then", "the", "same", "again")
_LONGEST_GAP = 48
"""Tokens of filler, at least, that the last sentence of filler may have to fill."""


@dataclass(frozen=True)
class Fact:
    """One name with its code; `depth` is the place of the fact in the text, from 0 (start) to 1 (end)."""

    name: str
    code: str
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A text with facts; each question has the token count `question_tokens`, so all prompts are equally long."""

    text: str
    facts: tuple[Fact, ...]
    question_tokens: int
    _padding: dict[str, int]

    def question(self, fact: Fact) -> str:
        """The words that follow `text` to ask for `fact`; the model answers with the code and stops."""
        return self.chat_question(fact) + " " + ANSWER_CUE

    def chat_question(self, fact: Fact) -> str:
        """`question` without the closing cue, which the chat template adds by itself."""
        return " " + _question(fact.name, self._padding.get(fact.name, 0))


class FillerGrammar:
    """Draws filler sentences; the names in `taken` never occur in them."""

    def __init__(self, rng: random.Random, taken: frozenset[str]) -> None:
        self._rng = rng
        self._taken = taken

    def sentence(self) -> str:
        """One filler sentence, without surrounding spaces."""
        rng = self._rng
        form = rng.choice(FILLER_FORMS)
        words = {slot: rng.choice(choices) for slot, choices in _SLOTS.items() if "{" + slot + "}" in form}
        if "{number}" in form:
            words["number"] = str(rng.randrange(10 ** rng.randint(1, CODE_DIGITS)))
        if "{word}" in form:
            words["word"] = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 6)))
        if "{name}" in form:
            words["name"] = self._free_name()
        return form.format(**words)

    def _free_name(self) -> str:
        while True:
            name = f"{self._rng.choice(ADJECTIVES)} {self._rng.choice(NOUNS)}"
            if name not in self._taken:
                return name


def fact_sentence(rng: random.Random, name: str, code: str) -> str:
    """A sentence that states the fact, in one of its phrasings."""
    return rng.choice(FACT_FORMS).format(name=name, code=code)


def draw_names(rng: random.Random, count: int) -> list[str]:
    """`count` different names in random order."""
    every = len(ADJECTIVES) * len(NOUNS)
    return [
        f"{ADJECTIVES[index // len(NOUNS)]} {NOUNS[index % len(NOUNS)]}" for index in rng.sample(range(every), count)
    ]


def draw_code(rng: random.Random) -> str:
    """A code of five digits, leading zeros allowed."""
    return f"{rng.randrange(10**CODE_DIGITS):0{CODE_DIGITS}d}"


def default_facts(context: int) -> int:
    """How many facts a text of this length holds unless told otherwise: one in 128 tokens, 8 to 1,024."""
    return min(1024, max(8, context // 128))


def vocabulary_words() -> list[str]:
    """Every word the grammar can produce, in a fixed order; numbers and spelled words are not among them."""
    texts = [*FACT_FORMS, *QUESTION_FORMS, ANSWER_CUE, *FILLER_FORMS, *_PADDING, *ADJECTIVES, *NOUNS]
    for choices in _SLOTS.values():
        texts.extend(choices)
    words: dict[str, None] = {}
    for text in texts:
        for piece in text.split():
            if "{" not in piece:
                words.setdefault(piece.strip(".,:?"))
    return list(words)


def build_haystack(
    context: int,
    *,
    seed: int,
    count: Callable[[str], int],
    reserve: int,
    facts: int | None = None,
    depth: float | None = None,
) -> Haystack:
    """Builds a text for prompts of exactly `context` tokens: `reserve` + the text + one question.

    `count` gives the tokens of a piece of text; it is called once for every different word, with its leading
    space, and must be additive over words (true where words and digits are split before tokenizing). `reserve`
    is what the caller adds around text and question: 1 for a begin-of-sequence token, more for other templates.
    Raises ValueError for a tokenizer that splits the words which fill the last gap: it could miss the length.
    With `depth`, the first fact of the result stands at this depth; the others are spread at random.
    """
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    number = default_facts(context) if facts is None else facts
    if not 1 <= number <= len(ADJECTIVES) * len(NOUNS):
        raise ValueError(f"facts must be between 1 and {len(ADJECTIVES) * len(NOUNS)}, got {number}")

    rng = random.Random(seed)
    counter = _WordCounter(count)
    _check_padding(counter)
    names = draw_names(rng, number)
    codes = [draw_code(rng) for _ in names]
    sentences = [fact_sentence(rng, name, code) for name, code in zip(names, codes, strict=True)]
    questions = {name: counter.tokens(f"{_question(name, 0)} {ANSWER_CUE}") for name in names}
    question_tokens = max(questions.values())
    budget = context - reserve - question_tokens
    filler = budget - sum(counter.tokens(sentence) for sentence in sentences)
    smallest_gap = counter.tokens(_padding_sentence(2))
    if filler < smallest_gap:
        least = context - filler + smallest_gap
        raise ValueError(f"a context of {context} tokens is too small for {number} facts: at least {least} are needed")

    depths = [rng.random() if depth is None or index else depth for index in range(number)]
    grammar = FillerGrammar(rng, frozenset(names))
    text, places = _interleave(sentences, [at * budget for at in depths], filler, grammar, counter)
    assert counter.tokens(text) == budget
    return Haystack(
        text=text,
        facts=tuple(Fact(name, code, place / budget) for name, code, place in zip(names, codes, places, strict=True)),
        question_tokens=question_tokens,
        _padding={name: question_tokens - tokens for name, tokens in questions.items() if tokens < question_tokens},
    )


def _interleave(
    sentences: list[str], wanted: list[float], filler: int, grammar: FillerGrammar, counter: _WordCounter
) -> tuple[str, list[int]]:
    """The sentences among `filler` tokens of filler, and the token at which each starts.

    A sentence starts as soon as the text has reached its wanted token, or when no filler is left to go before it.
    """
    waiting = deque(sorted(range(len(sentences)), key=lambda index: (wanted[index], index)))
    places = [0] * len(sentences)
    smallest_gap = counter.tokens(_padding_sentence(1))
    text: list[str] = []
    used = 0
    while waiting or filler > 0:
        if waiting and (used >= wanted[waiting[0]] or filler == 0):
            index = waiting.popleft()
            places[index] = used
            sentence = sentences[index]
        else:
            sentence = grammar.sentence()
            # What a sentence leaves must have room for another: with some tokenizers one is longer than the gap.
            if filler <= _LONGEST_GAP or filler < counter.tokens(sentence) + smallest_gap:
                sentence = _padding_sentence(_padding_words(counter, filler))
            filler -= counter.tokens(sentence)
        text.append(sentence)
        used += counter.tokens(sentence)
    return " ".join(text), places


class _WordCounter:
    """Counts tokens word by word, each different word once."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._known: dict[str, int] = {}

    def tokens(self, text: str) -> int:
        known = self._known
        total = 0
        for word in text.split():
            tokens = known.get(word)
            if tokens is None:
                tokens = known[word] = self._count(" " + word)
            total += tokens
        return total


def _question(name: str, padding: int) -> str:
    words = list(islice(cycle(_PADDING), padding))
    return " ".join([*words, QUESTION_FORMS[0].format(name=name)])


def _padding_sentence(words: int) -> str:
    """A sentence of `words` words and a full stop."""
    return " ".join(islice(cycle(_PADDING), words)) + "."


def _check_padding(counter: _WordCounter) -> None:
    """Raise ValueError unless each padding word is one token and the full stop adds the same number to each."""
    stop = counter.tokens(_padding_sentence(1)) - 1
    for word in _PADDING:
        if counter.tokens(word) != 1 or counter.tokens(word + ".") != 1 + stop:
            raise ValueError(
                f"the tokenizer makes {counter.tokens(word)} tokens of {word!r} and {counter.tokens(word + '.')} of "
                f"{word + '.'!r}; exact lengths need 1 and {1 + stop}. Use a tokenizer that keeps common words whole"
            )


def _padding_words(counter: _WordCounter, tokens: int) -> int:
    """How many padding words, with the full stop, make `tokens` tokens; a word is one token."""
    stop = counter.tokens(_padding_sentence(1)) - 1
    if tokens <= stop:
        raise ValueError(f"a gap of {tokens} tokens cannot be filled: no room for a word and its full stop")
    return tokens - stop
