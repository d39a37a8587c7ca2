"""The model card: what a draft is, what it was made of, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.distill.hits import DEPTHS, WIDTHS

FEATURES_NOTE = (
    "It is a feature draft: it reads the hidden rows of {target}, and has the embedding and the head of that "
    "model in place of its own. It serves this very model and no other."
)


def model_card(record: Mapping[str, Any]) -> str:
    """Markdown with the metadata that hubs read. record: as `distill` writes it to judged.json."""
    target = record["data"]["target"]
    parts = [
        f"---\nlibrary_name: specinfer\ntags: [speculative-decoding, draft]\nbase_model: {target}\n---",
        f"# A draft for {target}",
        f'Made by `specinfer distill`. Use it with `LLM("{target}", drafts=["..."])`: it guesses, the target '
        "decides, and the text is the target's to the last token.",
        *([FEATURES_NOTE.format(target=target)] if record["reads_features"] else []),
        "## Where it comes from",
        f"- Trained on what {target} wrote itself: {record['num_lessons']} answers, "
        f"{record['num_training_tokens']} tokens, at temperatures {_list(record['data']['temperatures'])}, "
        "and on the target's own probabilities.",
        f"- Prompts: {record['data']['source']} ({record['data']['prompts']}), {target}'s own questions, "
        f"{record['data']['num_questions']} at most, and what was asked about passages of its own, "
        f"{record['data']['num_passages']} at most. 1 in 20 was kept for early stopping and 1 in 20 for the "
        "figures below, by hash; neither was trained on.",
        f"- Licence: the weights come from the output of {target} and from its own weights: its licence "
        "applies, and that of the prompts. Neither is judged here: fill in what you publish under.",
        "## How often it finds the target's token",
        "Greedy, on held-out prompts of the kinds it was trained on. A row is the share of places where the "
        "next tokens, down to that depth, are all among its best k.",
    ]
    for draft in record["drafts"]:
        parts.append(f"### {draft['name']}: {draft['num_parameters'] / 1e6:.1f}M parameters")
        parts.append(coverage_table(draft["coverage"]))
    if record["boosting"]:
        parts.append("## Together")
        parts.append(boosting_text(record["boosting"]))
    parts.append("## Speed")
    parts.append(
        f"{record['num_judged_prompts']} held-out prompts, batch 1, {record['machine']}, every way in one "
        "interleaved run; acceptance length counts the target's own token."
    )
    for name, paces in record["paces"].items():
        parts += [f"### {name}", pace_table(paces)]
    return "\n\n".join(parts) + "\n"


def coverage_table(coverage: Sequence[Sequence[float]]) -> str:
    """[depth][width] shares, of as many of DEPTHS as there are."""
    return table(
        ["depth", *(f"top {width}" for width in WIDTHS)],
        [[str(depth), *(f"{x:.3f}" for x in row)] for depth, row in zip(DEPTHS, coverage, strict=False)],
    )


def boosting_text(boosted: Mapping[str, Any]) -> str:
    """What each member adds, what it costs, and whether one larger draft would have been better."""
    rows = [
        [row["name"], f"{row['milliseconds']:.2f}", *(f"{x:.3f}" for x in row["depths"])]
        for row in boosted["rows"]
    ]
    depths = DEPTHS[: len(boosted["rows"][0]["depths"])]
    header = ["drafts", "ms a forward", *(f"depth {depth}" for depth in depths)]
    note = (
        "Shares of places where one of the candidates is right, all the way down to a depth. "
        "A member names one candidate."
    )
    return f"{note}\n\n{table(header, rows)}\n\n{boosted['verdict']}"


def pace_table(paces: Sequence[Mapping[str, Any]]) -> str:
    """One row per way and temperature."""
    rows = [
        [
            f"{pace['temperature']:g}",
            pace["way"],
            f"{pace['acceptance_length']:.2f}",
            "-" if pace["tokens_per_second"] is None else f"{pace['tokens_per_second']:.1f}",
            "-" if pace["speedup"] is None else f"{pace['speedup']:.2f}",
            str(pace["num_identical"]),
        ]
        for pace in paces
    ]
    header = ["temperature", "tree", "acceptance length", "tokens/s", "times plain", "identical"]
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _list(values: Sequence[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)
