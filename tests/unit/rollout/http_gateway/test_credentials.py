"""Which of the headers of a request is its credential."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.request_body import bearer, credential

OF_ROLLOUT = f"abc.{'0' * 64}"
OTHER = f"def.{'1' * 64}"


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({}, None),
        ({"Authorization": "Bearer t"}, "t"),
        ({"Authorization": "bearer   t "}, "t"),
        ({"x-api-key": "k"}, "k"),
        ({"Authorization": "Basic dTpw"}, None),
        ({"Authorization": "Basic dTpw", "x-api-key": "k"}, "k"),
        ({"Authorization": "Bearer t", "x-api-key": "k"}, "t"),
        ({"Authorization": "Bearer t", "x-api-key": OF_ROLLOUT}, OF_ROLLOUT),
        ({"Authorization": f"Bearer {OF_ROLLOUT}", "x-api-key": OTHER}, OF_ROLLOUT),
    ],
)
def test_that_of_a_rollout_counts(headers: dict[str, str], shown: str | None) -> None:
    """Before a login that the program sends beside it; of two of them the bearer's."""
    assert bearer(make_mocked_request("POST", "/", headers)) == shown


@pytest.mark.parametrize("text", ["a b", "é", "x" * 4097, ""])
def test_what_cannot_be_a_token_is_refused(text: str) -> None:
    """Status 401, without the text."""
    with pytest.raises(ApiError) as refused:
        bearer(make_mocked_request("POST", "/", {"x-api-key": text}))
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert not text or text not in refused.value.message


def test_a_missing_credential_names_where_to_get_one() -> None:
    """Status 401."""
    with pytest.raises(ApiError) as refused:
        credential(make_mocked_request("POST", "/"))
    assert refused.value.status == 401
    assert "POST /rollouts/lease" in refused.value.message
