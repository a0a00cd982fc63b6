"""What every agent has: two tools, a question, and the form of a structured answer."""

from __future__ import annotations

QUESTION = "What is 2 + 3, and how is the weather in Ulm?"
REPORT = "Report the sum and the weather in Ulm."


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"
