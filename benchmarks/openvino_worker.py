"""OpenVINO GenAI behind lines of JSON, for an environment of its own: see `openvino_way` in peers.py."""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino
import openvino_genai

pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
for line in sys.stdin:
    question = json.loads(line)
    prompt = np.array([question["prompt"]], np.int64)
    config = openvino_genai.GenerationConfig(
        max_new_tokens=question["max_tokens"], do_sample=False, eos_token_id=question["end"]
    )
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
    result = pipeline.generate(inputs, config)
    metrics = result.perf_metrics
    answer = {"tokens": result.tokens[0], "ttft": metrics.get_ttft().mean, "tpot": metrics.get_tpot().mean}
    print(json.dumps(answer), flush=True)
