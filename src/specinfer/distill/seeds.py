"""Built-in prompts: a small grammar of our own, from which a seed draws thousands of different ones."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import islice

from specinfer.distill.prompts import Prompt
from specinfer.errors import ConfigError

_SLOT = re.compile(r"\{([a-z_]+)(?:\.(\d+))?\}")
_RANGE = re.compile(r"\{(\d+)-(\d+)\}")
_TURN = "\n----\n"
_TRIES = 50


class Grammar:
    """`{name}` is any line of the rule `name`, filled in its turn; `{name.1}` is the same wherever it
    stands in one prompt; `{2-99}` is a number. What stands between `----` is user and assistant in turn.

    kinds: kind of prompt -> its templates. rules: rule -> its lines.
    """

    def __init__(self, kinds: Mapping[str, Sequence[str]], rules: Mapping[str, Sequence[str]]) -> None:
        self.kinds = kinds
        self.rules = rules

    @staticmethod
    def built_in(kinds: str = "kinds", **rules: Sequence[str]) -> Grammar:
        """kinds: the table of them. rules: more rules."""
        text = resources.files("specinfer.distill").joinpath("seeds.toml").read_text(encoding="utf-8")
        grammar = tomllib.loads(text)
        return Grammar(grammar[kinds], {**grammar["rules"], **rules})

    def fill(self, template: str, rng: random.Random) -> str:
        """One text of a template."""
        kept: dict[str, str] = {}

        def slot(match: re.Match[str]) -> str:
            name, number = match.groups()
            if number is None:
                return expand(rng.choice(self.rules[name]))
            if match.group() not in kept:
                kept[match.group()] = expand(rng.choice(self.rules[name]))
            return kept[match.group()]

        def expand(text: str) -> str:
            text = _SLOT.sub(slot, text)
            return _RANGE.sub(lambda m: str(rng.randint(int(m[1]), int(m[2]))), text)

        return expand(template)

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Different prompts, the kinds in turn; a kind that has nothing new to say is left out."""
        rng = random.Random(seed)
        seen: set[str] = set()
        kinds = dict(self.kinds)
        while kinds:
            for kind, templates in list(kinds.items()):
                drawn = (self.fill(rng.choice(templates), rng) for _ in range(_TRIES))
                text = next((text for text in drawn if text not in seen), None)
                if text is None:
                    del kinds[kind]
                    continue
                seen.add(text)
                yield Prompt.of_turns(kind, text.split(_TURN))


def built_in_prompts(count: int, seed: int) -> list[Prompt]:
    """The first `count` prompts of a seed. Raises ConfigError if there are not so many."""
    prompts = list(islice(Grammar.built_in().prompts(seed), count))
    if len(prompts) < count:
        raise ConfigError(
            f"the built-in prompts end at {len(prompts)}, asked for are {count}",
            hint="give --prompts of your own",
        )
    return prompts
