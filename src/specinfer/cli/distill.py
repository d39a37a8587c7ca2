"""`specinfer distill` and `specinfer judge`: a draft of one's own, and what a draft is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specinfer.cli.console import print_json
from specinfer.cli.options import OutputOptions, takes_options


@takes_options
def distill(
    output: OutputOptions,
    target: Annotated[str, Argument(help="Built-in name, directory, .gguf file or hub name.")],
    out_path: Annotated[
        Path, Option("--out", help="Where the draft goes, and all that it takes to resume.", metavar="DIR")
    ],
    data: Annotated[
        Path | None,
        Option(
            help="Where the target's answers are, to share them between runs; OUT/data unless given.",
            metavar="DIR",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(
            help="JSON lines, or plain text to go on with; built-in prompts unless given.", metavar="FILE"
        ),
    ] = None,
    num_prompts: Annotated[int, Option(help="How many built-in prompts.")] = 2000,
    num_questions: Annotated[
        int | None,
        Option(
            help="How many questions more the target asks itself, and for every 4 of them a passage that it "
            "writes and is asked about. 2000 beside built-in prompts where it has a chat template, else 0.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, Option(help="Longest answer.")] = 192,
    size: Annotated[
        str | None,
        Option(
            help="Parameters of the draft, in millions. 7m unless given.", metavar="7m", show_default=False
        ),
    ] = None,
    features: Annotated[
        bool,
        Option(
            "--features",
            help="Make a feature draft: one layer that reads the hidden rows of its target, a Llama.",
        ),
    ] = False,
    vocab: Annotated[int, Option(help="Tokens of the target's that the draft works on.")] = 16384,
    init: Annotated[
        str | None,
        Option(help="A draft to train further, instead of --size and --vocab.", metavar="NAME"),
    ] = None,
    epochs: Annotated[int, Option(help="How often the answers are learnt from.")] = 6,
    learning_rate: Annotated[
        float | None, Option(help="The highest. 2e-3 unless given, 5e-4 with --init.", show_default=False)
    ] = None,
    batch_tokens: Annotated[int, Option(help="Tokens of one step of the optimizer.")] = 2048,
    members: Annotated[
        int, Option(help="Drafts that learn what those before them miss; above 1 a larger one is compared.")
    ] = 1,
    seed: Annotated[int, Option(help="Of prompts, noise, weights and order.")] = 0,
    device: Annotated[str, Option(help="auto is cuda where there is one.", metavar="NAME")] = "auto",
    max_num_seqs: Annotated[int, Option(help="Answers that are written at once.")] = 32,
) -> None:
    """Make a draft for a target: it writes answers, a small model learns them, the engine judges it.

    A run that was interrupted goes on where it stopped when the same command is given again.
    """
    from specinfer.distill.card import pace_table
    from specinfer.distill.distillation import Distillation
    from specinfer.distill.settings import DistillSettings

    output.start()
    settings = DistillSettings(
        target=target,
        prompts=prompts,
        num_prompts=num_prompts,
        num_questions=num_questions,
        max_tokens=max_tokens,
        size=size,
        features=features,
        vocab_size=vocab,
        init=init,
        num_epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        num_members=members,
        seed=seed,
        device=device,
        max_num_seqs=max_num_seqs,
    )
    record = Distillation(settings, out_path, data, quiet=output.quiet).run()
    if output.as_json:
        print_json(record)
    else:
        for name, paces in record["paces"].items():
            print(f"{name}\n\n{pace_table(paces)}\n")
        output.note(f"the draft and its model card are in {out_path}")


@takes_options
def judge(
    output: OutputOptions,
    target: Annotated[str, Argument(help="Built-in name, directory, .gguf file or hub name.")],
    draft: Annotated[list[str], Argument(help="Drafts; several are merged.")],
    prompts: Annotated[Path, Option(help="JSON lines, or plain text to go on with.", metavar="FILE")],
    every: Annotated[int, Option(help="Take every n-th prompt.")] = 1,
    max_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    timed: Annotated[int, Option(help="Prompts that chains and trees are timed on.")] = 8,
    device: Annotated[str, Option(help="auto is cuda where there is one.", metavar="NAME")] = "auto",
) -> None:
    """Measure drafts on prompts: how often they find the target's token, and what that gains."""
    from specinfer.distill.card import coverage_table, pace_table
    from specinfer.distill.judge import judge_drafts

    output.start()
    record = judge_drafts(
        target,
        draft,
        prompts,
        every=every,
        max_tokens=max_tokens,
        num_timed=timed,
        device=device,
        quiet=output.quiet,
    )
    if output.as_json:
        print_json(record)
        return
    for name, table in record["coverage"].items():
        print(f"{name}: {record['num_tokens']} tokens\n\n{coverage_table(table)}\n")
    if record["paces"]:
        print(pace_table(record["paces"]))
