"""Update the table of dependencies in docs/licences.md from a CycloneDX file: `make sbom`.

cyclonedx-py lists the whole environment, including development tools. The file keeps only packages that serving needs,
according to the requirements of the installed packages. A row written by hand lists torch's CUDA packages.
"""

import base64
import importlib.metadata
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/licences.md"
TABLE = re.compile(r"(<!-- make sbom -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
CUDA = ("cuda-", "nvidia-", "triton")
# Licence names that packages declare, and the names in the table.
NAMES = {
    r".*GNU Library or Lesser.*|LGPL.*": "LGPL",
    r"GPLv2|GPL-2\.0.*": "GPL-2.0",
    r".*Mozilla Public.*|MPL-2\.0.*": "MPL-2.0",
    r"Apache( Software License|[ -]2\.0( License)?)?": "Apache-2.0",
    r"MIT( License)?|MIT-0": "MIT",
    r"(\d-Clause )?BSD( License)?|BSD-\d-Clause": "BSD",
    r"Python Software Foundation License|PSF-2\.0": "PSF-2.0",
    r"ISC License.*|ISC": "ISC",
}
PERMISSIVE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "MIT", "Zlib",
}  # fmt: skip


def runtime_packages() -> set[str]:
    """Return the names of all packages that serving needs on this machine, except CUDA packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, seen = [Requirement(each) for each in project["dependencies"]], set[tuple[str, frozenset[str]]]()
    while waiting:
        wanted = waiting.pop()
        known = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if known in seen or known[0].startswith(CUDA):
            continue
        seen.add(known)
        extras = (*wanted.extras, "")
        needed = map(Requirement, importlib.metadata.requires(wanted.name) or ())
        waiting += [
            each
            for each in needed
            if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return {name for name, _ in seen}


def licence(component: Mapping[str, Any]) -> str:
    """Return the canonical licence of a component. Raises `ValueError` if the component declares none."""
    for entry in component.get("licenses", []):
        declared = entry.get("license", {})
        said = entry.get("expression") or declared.get("id") or declared.get("name", "")
        if said.startswith("declared license of"):
            text = declared["text"]
            content = text["content"]
            said = base64.b64decode(content).decode() if text.get("encoding") == "base64" else content
            said = said.strip().partition("\n")[0]
        if said.startswith("declared license file"):
            continue
        said = said.rpartition(" :: ")[2]
        if len(parts := set(re.split(" AND | OR ", said))) > 1 and parts <= PERMISSIVE:
            return "several permissive ones"
        return next((name for pattern, name in NAMES.items() if re.fullmatch(pattern, said)), said)
    raise ValueError(f"{component['name']} declares no licence: read its files, and add it to docs/licences.md by hand")


def table(components: Iterable[Mapping[str, Any]]) -> str:
    """Build a table with one row per licence, most frequent first."""
    names = defaultdict[str, list[str]](list)
    for component in components:
        names[licence(component)].append(canonicalize_name(component["name"]))
    rows = sorted(names.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join(
        ["| licence | packages |", "|---|---|", *(f"| {name} | {', '.join(sorted(each))} |" for name, each in rows)]
    )


def listed(page: str) -> set[str]:
    """Return the packages in the table of a page."""
    found = TABLE.search(page)
    rows = found[0].splitlines()[3:] if found else []
    return {name for row in rows for name in row.strip("| ").rpartition(" | ")[2].split(", ")}


def main() -> None:
    """Remove packages that serving does not need from the file, and write the table."""
    file = Path(sys.argv[1])
    document = json.loads(file.read_text(encoding="utf-8"))
    wanted = runtime_packages()
    kept = [each for each in document["components"] if canonicalize_name(each["name"]) in wanted]
    references = {each["bom-ref"] for each in kept}
    document["components"] = kept
    document["dependencies"] = [
        {**each, "dependsOn": [other for other in each.get("dependsOn", []) if other in references]}
        for each in document["dependencies"]
        if each["ref"] in references or each["ref"] == "root-component"
    ]
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    new = table(kept)
    PAGE.write_text(TABLE.sub(lambda found: found[1] + new, page), encoding="utf-8")
    print(f"{file}: {len(kept)} packages; {PAGE.relative_to(ROOT)} has their licences")


if __name__ == "__main__":
    main()
