"""A draft that reads its target's hidden rows, in a real engine, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specinfer import LLM, SamplingParams
from specinfer.draft.drafter import Proposal
from specinfer.errors import ConfigError, ModelError
from specinfer.models.gguf import GGUFFile
from specinfer.runtime.native import NativeRunner
from specinfer.structured_outputs import StructuredOutputsParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Reference = Callable[[list[int], list[int]], torch.Tensor]


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, 256, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def reference(tiny_model: Path, feature_draft: Path) -> Reference:
    """reference(tokens, path): the draft's logits [target vocabulary] after committed tokens and a path below
    them. The target's rows are known up to the last token but one; from there on the draft's own stand."""
    target = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    weights = load_file(str(feature_draft / "model.safetensors"))
    fuse = weights.pop("features.weight")
    d2t = load_file(str(feature_draft / "draft_vocab.safetensors"))["d2t"].long()
    draft = LlamaForCausalLM(LlamaConfig(**json.loads((feature_draft / "config.json").read_text()))).eval()
    draft.load_state_dict({**draft.state_dict(), **weights})

    def last_rows(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, given: rows.append(given[0][0]))
        model.model(**inputs)
        hook.remove()
        return rows[0]

    def scaled(rows: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()

    @torch.inference_mode()
    def logits(tokens: list[int], path: list[int]) -> torch.Tensor:
        embedded = target.model.embed_tokens(torch.tensor([*tokens, *path]))
        before = torch.zeros(1, 32)
        if len(tokens) > 1:
            before = torch.cat([before, last_rows(target, input_ids=torch.tensor([tokens[:-1]]))])
        while True:
            n = len(before)
            inputs = torch.cat([scaled(embedded[:n]), scaled(before)], dim=1) @ fuse.T
            own = last_rows(draft, inputs_embeds=inputs[None])[-1:]
            if n == len(embedded):
                break
            before = torch.cat([before, own])
        said = torch.full((300,), -torch.inf)
        said[d2t] = (draft.model.norm(own) @ target.lm_head.weight[d2t].T)[0]
        return said

    return logits


def check_proposals(llm: LLM, asked: list[list[int]], reference: Reference, widths: tuple[int, ...]) -> int:
    """Every tree that is proposed meanwhile holds the reference's best; how many there were."""
    drafter = llm.engine.parts.drafter
    assert drafter is not None
    drafted: list[tuple[list[int], Proposal]] = []
    launch = drafter.launch

    def watched(contexts: Any, topology: Any) -> list[Proposal]:
        proposals = launch(contexts, topology)
        assert isinstance(proposals, list)
        drafted.extend((list(c.tokens), p) for c, p in zip(contexts, proposals, strict=True))
        return proposals

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "launch", watched)
        llm.generate(asked, PARAMS, progress=False)
        llm.engine.check_integrity()
    for tokens, (tree, _) in drafted:
        for node in range(tree.num_nodes):
            if tree.depths[node] < tree.max_depth:
                path = [int(token) for token in tree.path_tokens(node)]
                best = reference(tokens, path).topk(widths[tree.depths[node]]).indices.tolist()
                assert [int(tree.token_ids[c]) for c in tree.children[node]] == best
    return len(drafted)


@pytest.mark.parametrize("level", ["", "off"])
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 5, "max_num_seqs": 3}], ids=["whole", "chunks"])
def test_children_are_the_best_after_the_targets_rows(
    tiny_model: Path,
    feature_draft: Path,
    reference: Reference,
    limits: dict[str, int],
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where rows come in chunks, from a prefix that another request computed, or after preemption."""
    monkeypatch.setenv("SPECINFER_CPU", level)
    llm = LLM(str(tiny_model), drafts=[str(feature_draft)], tree="2,2,1", dtype="float32", **limits)  # type: ignore[arg-type]
    asked = prompts(1, 9, 30)
    assert check_proposals(llm, [*asked, asked[2][:20] + asked[1], asked[2]], reference, (2, 2, 1)) > 20


@pytest.mark.parametrize("level", ["", "off"])
def test_bf16(tiny_model: Path, feature_draft: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECINFER_CPU", level)
    plain, drafted = (
        LLM(str(tiny_model), drafts=drafts, dtype="bfloat16", tree="2,1").generate(
            prompts(9, 20), PARAMS, progress=False
        )
        for drafts in ([], [str(feature_draft)])
    )
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]


def test_preempted_requests_keep_their_rows(
    tiny_model: Path, feature_draft: Path, reference: Reference
) -> None:
    per_slot = 256 + 128 + 128  # K/V of both, and a row
    llm = LLM(
        str(tiny_model), drafts=[str(feature_draft)], tree="1,1", dtype="float32", kv_memory=64 * per_slot
    )
    asked = [[1, 2, 3, 4, 5, 6, 7, 8, i] for i in range(6)]
    assert check_proposals(llm, asked, reference, (1, 1)) > 20
    assert llm.engine.parts.scheduler.num_preemptions > 0


def test_a_draft_that_passes_rows_on_is_right(tiny_model: Path, feature_draft: Path, tmp_path: Path) -> None:
    """A target of which a token alone decides the next one, and a draft that passes on what it reads."""
    target, draft = (shutil.copytree(path, tmp_path / path.name) for path in (tiny_model, feature_draft))

    def without_layers(path: Path) -> dict[str, torch.Tensor]:
        weights = load_file(str(path / "model.safetensors"))
        for name, tensor in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        return {**weights, "model.norm.weight": torch.ones(32)}

    weights = without_layers(target)
    # After token t comes t + 1.
    weights["lm_head.weight"] = torch.nn.functional.normalize(weights["model.embed_tokens.weight"]).roll(1, 0)
    save_file(weights, str(target / "model.safetensors"))
    passed_on = torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1)
    save_file({**without_layers(draft), "features.weight": passed_on}, str(draft / "model.safetensors"))
    (draft / "draft_vocab.safetensors").unlink()
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    llm = LLM(str(target), drafts=[str(draft)], tree="1,1,1", dtype="float32")
    output = llm.generate([[7]], PARAMS, progress=False)[0].outputs[0]
    assert output.token_ids == tuple(range(8, 20))
    assert output.stats.acceptance_length == 4


def test_forced_tokens_go_before_it(tiny_model: Path, feature_draft: Path) -> None:
    """Below what a grammar forces there is a trunk that the target has not read."""
    form = StructuredOutputsParams(regex="(abcdefghij|klmnopqrst)+")
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=form)
    plain = LLM(str(tiny_model), dtype="float32").generate("x", params, progress=False)
    llm = LLM(str(tiny_model), drafts=[str(feature_draft)], tree="2,1", dtype="float32")
    assert llm.generate("x", params, progress=False)[0].outputs[0].text == plain[0].outputs[0].text


def test_beside_a_target_that_torch_runs(feature_draft: Path, write_model: Any, tmp_path: Path) -> None:
    """Where the target cannot run natively, the draft does not either."""
    target = write_model(tmp_path / "odd", head_dim=12)
    plain, drafted = (
        LLM(str(target), drafts=drafts, tree="2,1").generate(prompts(9), PARAMS, progress=False)[0].outputs[0]
        for drafts in ([], [str(feature_draft)])
    )
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_draft_tokens > 0


def test_beside_a_native_target_it_must_run_natively(
    tiny_model: Path, feature_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = shutil.copytree(feature_draft, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    (odd / "config.json").write_text(json.dumps({**config, "head_dim": 12}))
    weights = load_file(str(odd / "model.safetensors"))
    attention = "model.layers.0.self_attn"
    for name, rows in [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)]:
        weights[f"{attention}.{name}.weight"] = torch.zeros(12 * rows, config["hidden_size"])
    weights[f"{attention}.o_proj.weight"] = torch.zeros(config["hidden_size"], 12 * heads)
    save_file(weights, str(odd / "model.safetensors"))
    if isinstance(LLM(str(tiny_model)).engine.parts.runner, NativeRunner):
        with pytest.raises(ModelError, match="cannot run so itself: a head dimension of 12"):
            LLM(str(tiny_model), drafts=[str(odd)])
    monkeypatch.setenv("SPECINFER_CPU", "off")
    assert LLM(str(tiny_model), drafts=[str(odd)], tree="1").generate(prompts(9), PARAMS, progress=False)


def test_packed_it_says_the_same(tiny_model: Path, feature_draft: Path, tmp_path: Path) -> None:
    from specinfer.distill.packing import pack

    pack(feature_draft, tmp_path / "draft.gguf")
    assert "features.weight" in GGUFFile(tmp_path / "draft.gguf").names()
    asked = prompts(9, 20)
    both = [
        LLM(str(tiny_model), drafts=[str(path)], tree="1,1").generate(asked, PARAMS, progress=False)
        for path in (feature_draft, tmp_path / "draft.gguf")
    ]
    drafted = [[output.outputs[0].stats.num_accepted_tokens for output in outputs] for outputs in both]
    assert drafted[0] == drafted[1]


def test_what_it_cannot_be_used_with(
    tiny_model: Path, feature_draft: Path, write_model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no model by itself"):
        LLM(str(feature_draft))
    wider = write_model(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ConfigError, match="hidden rows of 32, the target's have 64"):
        LLM(str(wider), drafts=[str(feature_draft)])
    broken = shutil.copytree(feature_draft, tmp_path / "broken")
    weights = load_file(str(broken / "model.safetensors"))
    save_file({**weights, "features.weight": torch.zeros(32, 32)}, str(broken / "model.safetensors"))
    with pytest.raises(ModelError, match=r"features(\.weight)? is \(?32( x|,) 32"):
        LLM(str(tiny_model), drafts=[str(broken)])
