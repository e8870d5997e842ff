"""A stand-in for kubectl: keeps objects as JSON files in the folder OBJECTS, one for each."""

import argparse
import json
import os
import sys
from pathlib import Path

import yaml

OBJECTS = Path(os.environ["OBJECTS"])


def place(kind, name, namespace):
    return OBJECTS / f"{namespace or 'default'}.{kind.lower()}.{name}.json"


def fail(text):
    sys.exit(f"Error from server: {text}")


parser = argparse.ArgumentParser()
parser.add_argument("--namespace")
verbs = parser.add_subparsers(dest="verb", required=True)
for verb in ("apply", "get", "delete", "patch", "logs"):
    one = verbs.add_parser(verb)
    one.add_argument("words", nargs="*")
    one.add_argument("-f", dest="file")
    one.add_argument("-o", dest="output")
    one.add_argument("-l", dest="labels")
    one.add_argument("-p", dest="patch")
    one.add_argument("-c", dest="container")
    one.add_argument("--type")
    one.add_argument("--tail")
    one.add_argument("--follow", action="store_true")
    one.add_argument("--cascade")
    one.add_argument("--wait", default="true")
    one.add_argument("--ignore-not-found", action="store_true")
given = parser.parse_args()
with (OBJECTS / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")

if given.verb == "apply":
    for new in yaml.safe_load_all(Path(given.file).read_text()):
        wanted = new["metadata"].get("namespace")
        if given.namespace != wanted:
            fail(f"the namespace {wanted} does not match {given.namespace}")
        file = place(new["kind"], new["metadata"]["name"], wanted)
        if file.exists() and "Job" in new["kind"] and json.loads(file.read_text()):
            fail("field is immutable")
        new["metadata"]["uid"] = f"uid-{len(list(OBJECTS.iterdir()))}"
        file.write_text(json.dumps(new))
elif given.verb == "get" and given.words == ["pods"]:
    file = OBJECTS / "pods"
    pods = json.loads(file.read_text()) if file.exists() else []
    print(json.dumps({"kind": "List", "metadata": {}, "items": pods}))
elif given.verb == "logs":
    print("logs", given.labels, given.container, given.tail, given.follow)
else:
    kind, name = given.words
    file = place(kind, name, given.namespace)
    if not file.exists():
        if given.ignore_not_found:
            sys.exit()
        fail(f'{kind} "{name}" not found')
    found = json.loads(file.read_text())
    if given.verb == "get":
        print(json.dumps(found))
    elif given.verb == "patch":
        found["metadata"] |= json.loads(given.patch)["metadata"]
        file.write_text(json.dumps(found))
    elif given.wait == "false":
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        file.write_text(json.dumps(found))
    else:
        file.unlink()
        for other in OBJECTS.glob("*.json"):
            owners = json.loads(other.read_text())["metadata"].get("ownerReferences", [])
            if found["metadata"]["uid"] in [one["uid"] for one in owners]:
                other.unlink()
