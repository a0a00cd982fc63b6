"""`python -m tools.release`: what a release changes, and what must agree in one.

versions.py   the places of the version
__main__.py   `prepare VERSION` writes them; `check --tag vVERSION` compares them
"""
