"""Agents of six frameworks, unmodified, through the real system."""
