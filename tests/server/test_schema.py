"""Requests made up from the server's own description: nothing but what it promises comes back."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

PROMISES = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
CHECKS = {
    GenerationMode.POSITIVE: PROMISES,
    GenerationMode.NEGATIVE: [*PROMISES, negative_data_rejection],
}
TIMEOUT = 60
NUM_EXAMPLES = 25


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_nothing_unpromised(server: Any, mode: GenerationMode) -> None:
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in description.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing to get wrong

        @settings(
            max_examples=NUM_EXAMPLES if operation.method == "post" else 2,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS[mode], timeout=TIMEOUT)

        check()
