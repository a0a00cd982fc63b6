"""The init project's model, so sure of itself that it always says the same."""

from __future__ import annotations

from tests.suites.health import letter_model

if __name__ == "__main__":
    letter_model.main(logit_scale=10_000.0)
