"""JSON by schema from the real target: all of it valid, and how many tokens a step yields.

    python benchmarks/structured.py --count 200 --out benchmarks/results/structured.json

Schemas and white space are bounded, so that the longest instance fits max_tokens: strings are ASCII, and a
token is at least a character. Every prompt is answered by every way before the next one is
taken, at temperature 0 and 0.8 in turn, batch 1. Answers of one grammar must be the same tokens in all ways.
Acceptance length counts the bonus token.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--tree", default="1,1")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    drafts = args.draft or ["default", "ngram"]
    llm = LLM(args.model, drafts=drafts, tree=args.tree, max_model_len=1024, max_num_seqs=1)
    parts = llm.engine.parts
    ways = {
        "plain": (True, replace(parts, drafter=None, max_forced_tokens=0)),
        "forced": (True, replace(parts, drafter=None)),
        "drafts": (True, replace(parts, max_forced_tokens=0)),
        "drafts and forced": (True, parts),
        "drafts, no grammar": (False, parts),
    }
    totals = {way: {"tokens": 0, "steps": 0, "seconds": 0.0} for way in ways}
    num_valid = num_equal = 0
    for i in range(args.count):
        what = list(SCHEMAS)[i % len(SCHEMAS)]
        schema = SCHEMAS[what]
        prompt = f"Describe {what} as JSON.{MANNERS[i // len(SCHEMAS) % len(MANNERS)]}"
        answers: dict[str, CompletionOutput] = {}
        for way, (has_grammar, ways_parts) in ways.items():
            form = {"json": schema, "disable_any_whitespace": True} if has_grammar else None
            params = SamplingParams(
                temperature=0.8 * (i % 2),
                seed=i,
                max_tokens=len(json.dumps(longest(schema))) + 1,
                structured_outputs=form,
            )
            llm.engine.parts = ways_parts
            start = time.perf_counter()
            [done] = llm.chat([{"role": "user", "content": prompt}], params, progress=False)[0].outputs
            totals[way]["seconds"] += time.perf_counter() - start
            totals[way]["tokens"] += done.stats.num_output_tokens
            totals[way]["steps"] += done.stats.num_steps
            if has_grammar:
                answers[way] = done
        num_equal += len({done.token_ids for done in answers.values()}) == 1
        num_valid += all(is_valid(done, schema) for done in answers.values())
    llm.engine.parts = parts
    result = {
        "count": args.count, "valid": num_valid, "equal": num_equal,
        "model": args.model, "drafts": drafts, "tree": args.tree,
        "date": datetime.date.today().isoformat(), "machine": platform.processor(),
        "ways": {
            way: {
                **t,
                "acceptance_length": t["tokens"] / t["steps"],
                "tokens_per_second": t["tokens"] / t["seconds"],
            }
            for way, t in totals.items()
        },
    }  # fmt: skip
    print(f"{num_valid} of {args.count} parse and validate, {num_equal} are the same tokens in every way")
    for way, t in result["ways"].items():
        print(f"{way:20} {t['acceptance_length']:5.2f} tokens a step {t['tokens_per_second']:7.1f} tokens/s")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if num_valid < args.count or num_equal < args.count:
        raise SystemExit(1)


def is_valid(done: CompletionOutput, schema: dict[str, Any]) -> bool:
    """Whether it ended by itself, parses and validates."""
    try:
        jsonschema.validate(json.loads(done.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{done.text!r}: {error}")
        return False
    return done.finish_reason == "stop"


if __name__ == "__main__":
    main()
