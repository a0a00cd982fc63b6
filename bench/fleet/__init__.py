"""Measurements of what many processes do together: weights that go from ranks to servers."""
