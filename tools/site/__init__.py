"""`make site`: the pages of this repository as a web site with search, and llms.txt.

pages.py      the pages, with links that hold inside of the site
__main__.py   writes them and lets MkDocs build, which checks every link
"""
