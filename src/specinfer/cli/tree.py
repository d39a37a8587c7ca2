"""`specinfer tree`: one step's token tree, as it was drafted and judged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from rich.tree import Tree
from typer import Argument, Option

from specinfer.cli.console import ACCEPTED_STYLE, QUIET_STYLE, out, print_json
from specinfer.cli.generate import read_prompt
from specinfer.cli.options import EngineOptions, OutputOptions, SamplingOptions, takes_options
from specinfer.cli.records import count
from specinfer.config import AUTO_TREE
from specinfer.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from specinfer.engine.parts import Emission
    from specinfer.llm import LLM
    from specinfer.models.tokenizer import Tokenizer
    from specinfer.sampling_params import SamplingParams

INDENT = 4
SHOWN_TREE = "3,2,1,1"


@takes_options
def tree(
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: Annotated[
        str | None,
        Argument(help="The text to continue; - or nothing reads it from stdin.", show_default=False),
    ] = None,
    steps: Annotated[int, Option("--steps", help="Show this step after the prompt's own.")] = 1,
) -> None:
    """Show the token tree of one step: each guess with its score, the accepted path, the target's next token.

    A score is the draft's estimate that the target takes this token once it has taken those above it.
    The tree is <3,2,1,1> unless --tree names another.
    """
    output.start()
    if engine.tree == AUTO_TREE:  # which needs more than one step to know what it wants
        engine = replace(engine, tree=SHOWN_TREE)
    engine.check()
    params = sampling.params()
    if steps < 1:
        raise ConfigError(f"--steps must be a positive integer, got {steps}")
    text = read_prompt(prompt)
    llm = engine.load(1)
    if not engine.drafts():
        output.note("no draft, so no guesses: leave --draft none out")
    prompt_token_ids = llm.tokenizer.encode(text)
    if sampling.max_tokens is None:  # as far as the context reaches, so that it does not clip the tree
        room = llm.engine.max_model_len - len(prompt_token_ids)
        params = sampling.params(max_tokens=max(1, room))
    emission = run_to(llm, prompt_token_ids, params, steps)
    if output.as_json:
        record = tree_record(emission, llm.tokenizer)
        print_json({"prompt": text, "prompt_token_ids": prompt_token_ids, "step": steps, **record})
    else:
        console = out()
        console.width = max(console.width, INDENT * emission.proposal.tree.max_depth + 60)
        console.print(drawn(emission, llm.tokenizer))


def run_to(llm: LLM, prompt_token_ids: list[int], params: SamplingParams, num_steps: int) -> Emission:
    """The emission of step `num_steps` after the prompt's own, which has no tree."""
    request = llm.engine.add_request(prompt_token_ids, params)[0]
    # A prompt of one token is its own root: already its step has a tree.
    left = num_steps + (len(prompt_token_ids) > 1)
    try:
        while request.finish_reason is None:
            for emission in llm.engine.step():
                left -= 1
                if left == 0:
                    return emission
    finally:
        llm.engine.abort(request)
    last = num_steps - left
    raise RequestError(
        f"the text ended after {count(last, 'step')}, before step {num_steps}",
        hint=f"--steps {last} is the last" if last > 0 else "try another prompt",
    )


def accepted_nodes(emission: Emission) -> list[int]:
    """The accepted path, the root left out."""
    accepted = emission.token_ids[: emission.num_accepted]
    return list(emission.proposal.tree.paths[emission.proposal.tree.places[accepted]])


def next_token(emission: Emission) -> int | None:
    """The target's own token below the accepted path; None if the path ended the text."""
    rest = emission.token_ids[emission.num_accepted :]
    return rest[0] if rest else None


def tree_record(emission: Emission, tokenizer: Tokenizer) -> dict[str, Any]:
    """JSON of the tree. Nodes are in its own order, a parent before its children."""
    tokens = emission.proposal.tree
    accepted = accepted_nodes(emission)
    own = next_token(emission)
    return {
        "nodes": [
            {
                "node": node,
                "parent": None if node == 0 else int(tokens.parents[node]),
                "depth": int(tokens.depths[node]),
                "token_id": int(tokens.token_ids[node]),
                "text": tokenizer.token_text(int(tokens.token_ids[node])),
                "score": None if node == 0 else float(tokens.scores[node]),
                "accepted": node in accepted,
            }
            for node in range(tokens.num_nodes)
        ],
        "accepted": accepted,
        "next_token": None if own is None else {"token_id": own, "text": tokenizer.token_text(own)},
        "token_ids": list(emission.token_ids),
    }


def drawn(emission: Emission, tokenizer: Tokenizer) -> Tree:
    """The tree for a person."""
    tokens = emission.proposal.tree
    accepted = accepted_nodes(emission)
    own = next_token(emission)

    def shown(token: int) -> str:
        return repr(tokenizer.token_text(token))

    root = Tree(Text.assemble(shown(int(tokens.token_ids[0])), ("  the text so far ends here", QUIET_STYLE)))
    branches = {0: root}
    last = accepted[-1] if accepted else 0
    for node in range(tokens.num_nodes):
        if node:
            is_accepted = node in accepted
            label = Text(shown(int(tokens.token_ids[node])), style=ACCEPTED_STYLE if is_accepted else "")
            label.append(f"  {tokens.scores[node]:.2f}", style=QUIET_STYLE)
            if is_accepted:
                label.append("  accepted")
            branches[node] = branches[int(tokens.parents[node])].add(label)
    if own is not None:
        branches[last].add(Text.assemble((shown(own), "bold"), ("  the target's next token", QUIET_STYLE)))
    return root
