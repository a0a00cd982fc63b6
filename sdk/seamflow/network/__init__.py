"""Addresses of services."""
