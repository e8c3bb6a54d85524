"""Writes what a run of pytest skipped for a reason that has a word in it: a file or test a line,
as pytest reads them from `@FILE`. Usage: list_skipped.py JUNIT_XML WORD FILE
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

path, word, listed = sys.argv[1:]
names = []
for case in ElementTree.parse(path).iter("testcase"):
    reasons = [f"{each.get('message')} {each.text}" for each in case.iter("skipped")]
    if any(word in reason.lower() for reason in reasons):
        # a file that is skipped as a whole stands as a test of that name, in no module
        module, test = (case.get("classname"), case.get("name"))
        file = Path((module or test).replace(".", "/")).with_suffix(".py")
        names.append(f"{file}::{test}" if module else str(file))
if not names:
    sys.exit(f"{path}: no test was skipped for {word!r}")
Path(listed).write_text("\n".join(names) + "\n", "utf-8")
