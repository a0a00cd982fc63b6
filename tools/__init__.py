"""Tools for people; no service imports them."""
