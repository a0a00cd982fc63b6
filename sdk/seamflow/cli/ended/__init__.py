"""Runs that have ended: what their folders tell without any service."""
