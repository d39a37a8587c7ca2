"""JSON by schema from the real target: all of it valid, and how many tokens a step yields.

    python benchmarks/structured.py --count 200 --batch 8 --out benchmarks/results/structured.json

Schemas and white space are bounded, so that the longest instance fits max_tokens: strings are ASCII, and a
token is at least a character. Each of the 48 prompts is answered at temperature 0 once, then at 0.8 with
other seeds; a batch of them by every way before the next one is taken. Answers of one grammar must be the
same tokens in all ways. Acceptance length counts the bonus token. Resumable: answers are kept beside the
output (*.answers.jsonl), and an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
from exactness import machine

from specinfer import LLM, CompletionOutput, SamplingParams

WORD = {"type": "string", "pattern": "^[A-Za-z][A-Za-z ]{0,19}$"}
LONGEST_WORD = "x" * 20
AGE = {"type": "integer", "minimum": 0, "maximum": 120}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any], longest: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": longest}


SCHEMAS = {
    "a person": record(name=WORD, age=AGE, city=WORD),
    "a book": record(title=WORD, author=WORD, year={"type": "integer", "minimum": 1500, "maximum": 2025}),
    "a recipe": record(dish=WORD, ingredients=listed(WORD, 4), minutes=AGE),
    "a city": record(city=WORD, country=WORD, is_capital={"type": "boolean"}, sights=listed(WORD, 3)),
    "an animal": record(animal=WORD, kind={"enum": ["mammal", "bird", "fish", "insect"]}, legs=AGE),
    "a team": record(team=WORD, players=listed(record(name=WORD, age=AGE), 3)),
    "an order": record(item=WORD, count=AGE, colour={"enum": ["red", "green", "blue", "black"]}),
    "a film": record(film=WORD, genres=listed({"enum": ["drama", "comedy", "crime"]}, 2), minutes=AGE),
}
MANNERS = ("", " Be brief.", " Make one up.", " Choose a famous one.", " From Italy.", " From the past.")


def longest(schema: dict[str, Any]) -> Any:
    """The instance of most characters."""
    if "enum" in schema:
        return max(schema["enum"], key=len)
    match schema["type"]:
        case "object":
            return {name: longest(part) for name, part in schema["properties"].items()}
        case "array":
            return [longest(schema["items"])] * schema["maxItems"]
        case "string":
            return LONGEST_WORD
        case "integer":
            return schema["maximum"]
        case _:
            return False


@dataclass(frozen=True)
class Question:
    """What is asked: the messages, the schema and the settings of prompt number i."""

    schema: dict[str, Any]
    messages: list[dict[str, str]]
    params: SamplingParams

    @staticmethod
    def number(i: int) -> Question:
        times, which = divmod(i, len(SCHEMAS) * len(MANNERS))
        manner, what = MANNERS[which // len(SCHEMAS)], list(SCHEMAS)[which % len(SCHEMAS)]
        messages = [{"role": "user", "content": f"Describe {what} as JSON.{manner}"}]
        params = SamplingParams(
            temperature=0.8 if times else 0.0,
            seed=i,
            max_tokens=len(json.dumps(longest(SCHEMAS[what]))) + 1,
            structured_outputs={"json": SCHEMAS[what], "disable_any_whitespace": True},
        )
        return Question(SCHEMAS[what], messages, params)


class Answers:
    """The answers of one setting (model, drafts, tree, machine) by way and prompt, one JSON line each."""

    def __init__(self, path: Path | None, setting: list[Any]) -> None:
        self._path, self._setting = path, setting
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that an interruption cut
            if row["setting"] == setting:
                self.rows[row["way"], row["prompt"]] = row

    def add(self, way: str, prompt: int, done: CompletionOutput, seconds: float) -> None:
        row = {
            "setting": self._setting, "way": way, "prompt": prompt, "text": done.text,
            "tokens": done.token_ids, "finish_reason": done.finish_reason,
            "steps": done.stats.num_steps, "seconds": seconds,
        }  # fmt: skip
        self.rows[way, prompt] = json.loads(json.dumps(row))
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def answer(llm: LLM, answers: Answers, way: str, has_grammar: bool, group: range) -> None:
    """A batch of prompts."""
    questions = [Question.number(i) for i in group]
    prompts = [llm.tokenizer.apply_chat_template(q.messages) for q in questions]
    params = [q.params if has_grammar else replace(q.params, structured_outputs=None) for q in questions]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = (time.perf_counter() - start) / len(group)
    for i, output in zip(group, outputs, strict=True):
        answers.add(way, i, output.outputs[0], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--tree", default="1,1")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    drafts = args.draft or ["default", "ngram"]
    setting = [args.model, drafts, args.tree, machine()]
    answers = Answers(args.out and args.out.with_suffix(".answers.jsonl"), setting)
    llm = LLM(args.model, drafts=drafts, tree=args.tree, max_model_len=1024, max_num_seqs=args.batch)
    parts = llm.engine.parts
    ways = {
        "plain": (True, replace(parts, drafter=None, max_forced_tokens=0)),
        "forced": (True, replace(parts, drafter=None)),
        "drafts": (True, replace(parts, max_forced_tokens=0)),
        "drafts and forced": (True, parts),
        "drafts, no grammar": (False, parts),
    }
    for start in range(0, args.count, args.batch):
        group = range(start, min(start + args.batch, args.count))
        for way, (has_grammar, way_parts) in ways.items():
            if any((way, i) not in answers.rows for i in group):
                llm.engine.parts = way_parts
                answer(llm, answers, way, has_grammar, group)
        print(f"{group.stop} of {args.count}", flush=True)
    result = {
        "command": f"python benchmarks/structured.py --count {args.count} --batch {args.batch}",
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "model": args.model, "drafts": drafts, "tree": args.tree,
        **summary(answers, args.count, [way for way, (has_grammar, _) in ways.items() if has_grammar]),
        "ways": {way: totals([answers.rows[way, i] for i in range(args.count)]) for way in ways},
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['valid']} of {args.count} parse and validate, {result['equal']} are equal in every way")
    for way, t in result["ways"].items():
        print(f"{way:20} {t['acceptance_length']:5.2f} tokens a step {t['tokens_per_second']:7.1f} tokens/s")
    if min(result["valid"], result["equal"]) < args.count:
        raise SystemExit(1)


def summary(answers: Answers, count: int, ways: list[str]) -> dict[str, int]:
    """valid: prompts whose answers are, in every way. equal: whose answers are the same tokens."""
    rows = [[answers.rows[way, i] for way in ways] for i in range(count)]
    return {
        "count": count,
        "valid": sum(all(is_valid(r, Question.number(i).schema) for r in rows[i]) for i in range(count)),
        "equal": sum(all(r["tokens"] == same[0]["tokens"] for r in same) for same in rows),
    }


def totals(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of one way."""
    tokens, steps = sum(len(r["tokens"]) for r in rows), sum(r["steps"] for r in rows)
    seconds = sum(r["seconds"] for r in rows)
    return {
        "tokens": tokens, "steps": steps, "seconds": seconds,
        "acceptance_length": tokens / steps, "tokens_per_second": tokens / seconds,
    }  # fmt: skip


def is_valid(row: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether it ended by itself, parses and validates."""
    try:
        jsonschema.validate(json.loads(row["text"]), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{row['text']!r}: {error}")
        return False
    return bool(row["finish_reason"] == "stop")


if __name__ == "__main__":
    main()
