"""Counts test cases: report.py DIR reads DIR/*.bep (Bazel), DIR/*.xml (pytest) and DIR/broken (one line a broken step).

Prints each failure's name and last of all `N passed, N failed`, with `, N skipped` if any was. Exits 1 on failures.
"""

import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as ET


def count_cases(xml_path, group):
    """(passed, failed names, skipped) of one JUnit file."""
    passed, failed, skipped = 0, [], 0
    for case in ET.parse(xml_path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{group}: {case.get('classname') or ''}.{case.get('name')}".replace(": .", ": "))
        elif case.find("skipped") is not None or case.get("result") in ("skipped", "suppressed"):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def bazel_results(bep_path):
    """(target, status, path of test.xml or None) of each test run, the last attempt of each."""
    last = {}
    for line in bep_path.read_text().splitlines():
        event = json.loads(line)
        if "testResult" not in event:
            continue
        run = event["id"]["testResult"]
        outputs = event["testResult"].get("testActionOutput", [])
        xml = next((o.get("uri") for o in outputs if o["name"] == "test.xml"), None)
        path = urllib.parse.unquote(urllib.parse.urlparse(xml).path) if xml else None
        last[run["label"], run.get("run"), run.get("shard")] = (run["label"], event["testResult"]["status"], path)
    return last.values()


def count_bazel(bep_path):
    passed, failed, skipped = 0, [], 0
    for label, status, xml in bazel_results(bep_path):
        p, f, s = 0, [], 0
        if xml and pathlib.Path(xml).exists():
            p, f, s = count_cases(xml, f"{label} ({bep_path.stem})")
        # A time-out, or a sanitizer's word after the last case, is in no case's account.
        if status not in ("PASSED", "FLAKY") and not f:
            f.append(f"{label} ({bep_path.stem}): {status}")
        passed, failed, skipped = passed + p, failed + f, skipped + s
    return passed, failed, skipped


def main():
    directory = pathlib.Path(sys.argv[1])
    parts = [count_bazel(path) for path in sorted(directory.glob("*.bep"))]
    parts += [count_cases(path, "python") for path in sorted(directory.glob("*.xml"))]
    broken = directory / "broken"
    parts.append((0, broken.read_text().splitlines() if broken.exists() else [], 0))

    passed = sum(part[0] for part in parts)
    failed = [name for part in parts for name in part[1]]
    skipped = sum(part[2] for part in parts)
    for name in failed:
        print("FAILED", name)
    print(f"{passed} passed, {len(failed)} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
