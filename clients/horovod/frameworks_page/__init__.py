"""docs/frameworks.md, made from the code: `python -m horovod.frameworks_page > docs/frameworks.md`.

    sources.py     what the modules export and which options it takes, read from their text: no framework is imported
    holes.py       what has another name in a framework, and why what is missing is missing
    page.py        both together

A name or an option that is new in one framework is a row on the page, and an error here until the others have it too or
holes.py says why not. A reason for what is there by now is an error as well.
"""
