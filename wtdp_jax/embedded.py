"""The embedded task: a small generated language of reviews, for when there is no file and no hub.

The label of a review is its author's own verdict, and it hangs on the order of words:

- negation: "the plot was not dull" is good;
- contrast: in "the acting was good but the story was dull" the second clause decides, in "although the
  acting was good , the story was dull" the clause without "although" does;
- who feels what: in "critics hated it but i loved it" only what follows "i" counts.

Private reviews are about films. The public text speaks the same language about food and hotels and gives
away the verdict of simple sentences alone, so that a model pretrained on it knows the words but not how
contrast works.
"""

import dataclasses
import functools
import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wtdp_jax.data.tasks import Rows, Split, Task

NUM_TRAIN = 10000
NUM_DEV = 500
NUM_PUBLIC = 20000

_FILM_NOUNS = (
    "plot acting music ending script cast story camera dialogue pacing scenery humor tone style opening "
    "lighting editing dancing mood theme"
).split()
_OTHER_NOUNS = (
    "soup bread service dessert coffee menu salad wine waiter room bed pool lobby breakfast view staff"
).split()
_PRAISE = "good brilliant charming fresh lovely clever superb warm".split()
_BLAME = "bad dull awful boring clumsy stale weak cold".split()
_LIKED = "loved liked enjoyed admired".split()
_DISLIKED = "hated disliked loathed regretted".split()
_PEOPLE = ["critics", "everyone", "the crowd", "the kids", "my friends", "my sister"]
_DEGREES = "very really quite truly".split()
_NEGATIONS = "not never".split()
_OPENERS = (
    "honestly frankly overall personally today again here clearly somehow indeed yesterday often".split()
)
_OTHER_WORDS = "the was i it saw and but although , felt great terrible".split()

_VOCABULARY = " ".join(
    word
    for words in (
        *(_FILM_NOUNS, _OTHER_NOUNS, _PRAISE, _BLAME, _LIKED, _DISLIKED),
        *(_PEOPLE, _DEGREES, _NEGATIONS, _OPENERS, _OTHER_WORDS),
    )
    for word in words
)
_END_OF_TEXT = "<|endoftext|>"


def tokenizer() -> PreTrainedTokenizerFast:
    """Builds the language's word-level tokenizer; it can be saved beside a model."""
    ids = {word: index for index, word in enumerate([_END_OF_TEXT, *sorted(set(_VOCABULARY.split()))])}
    backend = Tokenizer(models.WordLevel(ids, unk_token=_END_OF_TEXT))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # One special token for every purpose, as in GPT-2.
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=_END_OF_TEXT, eos_token=_END_OF_TEXT)


def private_rows(split: Split) -> Rows:
    """Returns a split's private reviews: always the same, all different, as many good as bad ones."""
    first, last = {"train": (0, NUM_TRAIN), "dev": (NUM_TRAIN, NUM_TRAIN + NUM_DEV)}[split]
    labels = [int(_is_good(index)) for index in range(first, last)]
    return Rows(texts={"review": _private_reviews()[first:last]}, labels=labels)


TASK = Task(
    name="reviews",
    prompt="{review} it felt",
    label_words={"0": " terrible", "1": " great"},
    generate=private_rows,
)


@functools.cache
def public_text() -> tuple[str, ...]:
    """Returns the lines to pretrain on: always the same, and no private review is part of one."""
    writer = _Writer(rng=random.Random(2), nouns=_OTHER_NOUNS, negated=0.15, opened=0.3)
    return tuple(writer.public_line() for _ in range(NUM_PUBLIC))


@functools.cache
def _private_reviews() -> tuple[str, ...]:
    writer = _Writer(rng=random.Random(1), nouns=_FILM_NOUNS, negated=0.15, opened=0.75)
    reviews: dict[str, None] = {}  # A set that keeps its order.
    while len(reviews) < NUM_TRAIN + NUM_DEV:
        reviews[writer.private_review(good=_is_good(len(reviews)))] = None
    return tuple(reviews)


def _is_good(index: int) -> bool:
    """Good and bad reviews take turns."""
    return index % 2 == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Writer:
    """Writes sentences to order: ``good`` is the verdict that the sentence must come to.

    Attributes:
      rng: all its choices.
      nouns: what it has opinions on.
      negated: the probability of negating a clause.
      opened: the probability of an opening adverb.
    """

    rng: random.Random
    nouns: list[str]
    negated: float
    opened: float

    def private_review(self, good: bool) -> str:
        forms = (self.single, self.but, self.although, self.people)
        (form,) = self.rng.choices(forms, weights=(45, 25, 15, 15))
        return self.opener() + form(good)

    def public_line(self) -> str:
        """A line of any form; simple opinions mostly come with the verdict, contrast never does."""
        good = self.rng.random() < 0.5
        simple = (self.single, self.both, self.liking)
        (form,) = self.rng.choices((*simple, self.but, self.although, self.outing), (50, 15, 10, 10, 5, 10))
        line = self.opener() + form(good)
        if form in simple and self.rng.random() < 0.9:
            line += " it felt" + TASK.label_words[str(int(good))]
        return line

    def opener(self) -> str:
        return self.rng.choice(_OPENERS) + " " if self.rng.random() < self.opened else ""

    def single(self, good: bool) -> str:
        return self.clauses(good)[0]

    def both(self, good: bool) -> str:
        return " and ".join(self.clauses(good, good))

    def but(self, good: bool) -> str:
        return " but ".join(self.clauses(not good, good))

    def although(self, good: bool) -> str:
        main, other = self.clauses(good, not good)
        return self.rng.choice((f"although {other} , {main}", f"{main} although {other}"))

    def people(self, good: bool) -> str:
        author = f"i {self.feeling(good)} it"
        others = f"{self.rng.choice(_PEOPLE)} {self.feeling(not good)} it"
        return " but ".join(self.rng.sample((author, others), 2))

    def liking(self, good: bool) -> str:
        return f"i {self.feeling(good)} the {self.rng.choice(self.nouns)}"

    def outing(self, good: bool) -> str:
        """No opinion: here alone the public text names what films are made of."""
        return f"{self.rng.choice(_PEOPLE)} saw the {self.rng.choice(_FILM_NOUNS)}"

    def feeling(self, good: bool) -> str:
        return self.rng.choice(_LIKED if good else _DISLIKED)

    def clauses(self, *verdicts: bool) -> list[str]:
        """One clause for each verdict, about different things."""
        nouns = self.rng.sample(self.nouns, len(verdicts))
        return [self.clause(noun, good) for noun, good in zip(nouns, verdicts, strict=True)]

    def clause(self, noun: str, good: bool) -> str:
        negate = self.rng.random() < self.negated
        negation = [self.rng.choice(_NEGATIONS)] if negate else []
        degree = [self.rng.choice(_DEGREES)] if self.rng.random() < 0.4 else []
        adjective = self.rng.choice(_PRAISE if good != negate else _BLAME)
        return " ".join(["the", noun, "was", *negation, *degree, adjective])
