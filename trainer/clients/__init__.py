"""Clients of the services a trainer calls. Calls are idempotent and retried until they succeed.

A trainer survives restarts of these services; it ends when a newer trainer has taken over
(`seamflow.errors.StaleEpochError`).
"""
