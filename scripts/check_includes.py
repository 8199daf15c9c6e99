#!/usr/bin/env python3
"""Checks every #include of the tree against the two tables below: who may include whom.

    scripts/check_includes.py [--root DIR]    one line for each violation, "file:line: why"; exit status 1 if any
    scripts/check_includes.py --self-test     proves on a temporary tree that violations are found

What a file includes itself is judged, not what comes with it. Python 3's standard library only.
"""

import argparse
import fnmatch
import os
import posixpath
import re
import subprocess
import sys
import tempfile

# The headers of the kernels whose enumerations are part of the layers' specs.
SPECS = ["lib/kernels/activation.h", "lib/kernels/matmul.h", "lib/kernels/normalize_rows.h"]
# What starts the kernels: the choice of SIMD target and of the matrix product.
START = ["lib/kernels/simd.h", "lib/kernels/matmul.h"]

# Each part of the tree, and which of our own headers it may include beside its own. Patterns of fnmatch, where * also
# matches slashes. ANYTHING is exempt from the second table too. A part that has no row may not exist.
ANYTHING = None
MAY_INCLUDE = {
    "lib/base": [],
    "lib/kernels": ["lib/base/*"],
    "lib/layers": ["lib/base/*", "lib/kernels/*"],
    "lib/reference": ["lib/base/*", "lib/layers/*", *SPECS],
    "lib/weights": ["lib/base/*", "lib/layers/*", *SPECS],
    "lib/resident": ["lib/base/*", "lib/layers/*", "lib/weights/*", *SPECS],
    "lib/engine": ["lib/base/*", "lib/layers/*", "lib/weights/*", "lib/resident/*", "lib/reference/*", *START],
    "wire": ["lib/base/*", "lib/layers/*", *SPECS, "lib/engine/layer_engine.h", "lib/reference/error_report.h",
             "lib/resident/layer_library.h", "lib/resident/layer_store.h"],
    "server": ["lib/base/*", "lib/engine/*", "lib/weights/*", "lib/resident/*", *START, "wire/*"],
    "client": ["lib/base/*", "lib/layers/*", "lib/reference/*", "lib/weights/*", "lib/resident/*", *SPECS, "lib/engine/layer_engine.h",
               "wire/*"],
    "tests": ANYTHING,
    "bench": ANYTHING,
    "examples": ANYTHING,
}

# Headers that are not ours (generated ones among them), and the only files that may include them.
ONLY_IN = [
    (["hwy/*"], ["lib/kernels/*"]),
    (["cblas*.h", "*/cblas*.h", "openblas*"], ["lib/kernels/*"]),
    (["tbb/*", "oneapi/*"], ["lib/base/parallel.cc"]),
    (["grpc*", "google/protobuf/*", "*.pb.h"], ["wire/*", "server/*", "client/*"]),
]

SOURCES = (".h", ".hh", ".hpp", ".inc", ".c", ".cc", ".cpp", ".cxx")
# #include HWY_TARGET_INCLUDE and its like name no file; Highway defines it as the file itself.
INCLUDE = re.compile(r'^\s*#\s*include(?:_next)?\s*(?:"([^"]+)"|<([^>]+)>)')


def part_of(path):
    """The row of MAY_INCLUDE that `path` belongs to: its first folder, or the first two in lib."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2] if folders[:1] == ["lib"] else folders[:1])


def matches(path, patterns):
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def source_files(root):
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and
                               not (folder == root and s.startswith(("build", "cmake-build"))))
        for name in sorted(names):
            if name.endswith(SOURCES):
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def resolve(root, path, name, quoted):
    """`name` as a path from the root, where it is written relative to the file `path` that includes it."""
    if quoted or name.startswith("."):
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if not beside.startswith("..") and os.path.isfile(os.path.join(root, beside)):
            return beside
    return posixpath.normpath(name)


def violation(path, included):
    """Why the file `path` may not include `included`; None where it may."""
    part = part_of(path)
    allowed = MAY_INCLUDE[part]
    if allowed is ANYTHING:
        return None
    target = part_of(included)
    if target in MAY_INCLUDE or included.split("/")[0] == "lib":
        if target != part and not matches(included, allowed):
            return f'{part} may not include "{included}"'
        return None
    for headers, files in ONLY_IN:
        if matches(included, headers) and not matches(path, files):
            return f'only {", ".join(files)} may include "{included}"'
    return None


def check(root):
    """All violations in the tree, in order, as "file:line: why"."""
    found = []
    for path in source_files(root):
        if part_of(path) not in MAY_INCLUDE:
            found.append(f'{path}:1: the table of scripts/check_includes.py has no row for "{part_of(path)}"')
            continue
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                include = INCLUDE.match(line)
                if not include:
                    continue
                included = resolve(root, path, include[1] or include[2], bool(include[1]))
                why = violation(path, included)
                if why:
                    found.append(f"{path}:{number}: {why}")
    return found


# Files of the self-test: what each includes, and whether that is a violation.
SELF_TEST = [
    ("lib/base/shape.cc", "<vector>", False),
    ("lib/base/shape.cc", '"absl/status/status.h"', False),
    ("lib/base/shape.cc", '"lib/base/dtype.h"', False),
    ("lib/base/shape.cc", '"lib/kernels/matmul.h"', True),
    ("lib/base/shape.cc", '"../kernels/simd.h"', True),
    ("lib/base/shape.cc", "<lib/layers/normalize.h>", True),
    ("lib/base/parallel.cc", "<tbb/parallel_for.h>", False),
    ("lib/base/shape.cc", '"tbb/parallel_for.h"', True),
    ("lib/kernels/openblas.cc", "<cblas.h>", False),
    ("lib/kernels/openblas.cc", '"lib/kernels/openblas.h"', False),
    ("lib/kernels/openblas.cc", '"hwy/highway.h"', False),
    ("lib/kernels/openblas.cc", '"lib/layers/normalize.h"', True),
    ("lib/layers/normalize.cc", '"lib/kernels/convert.h"', False),
    ("lib/layers/normalize.cc", '"hwy/highway.h"', True),
    ("lib/layers/normalize.cc", "<openblas/cblas.h>", True),
    ("lib/layers/normalize.cc", '"lib/weights/npy.h"', True),
    ("lib/layers/normalize.cc", '"lib/unheard/of.h"', True),
    ("lib/reference/reference.cc", '"lib/kernels/activation.h"', False),
    ("lib/reference/reference.cc", '"lib/kernels/convert.h"', True),
    ("lib/weights/npy.cc", '"lib/layers/normalize.h"', False),
    ("lib/weights/npy.cc", '"lib/engine/layer_engine.h"', True),
    ("lib/weights/npy.cc", "<google/protobuf/message.h>", True),
    ("lib/engine/cpu_engine.cc", '"lib/reference/judge.h"', False),
    ("lib/engine/cpu_engine.cc", '"lib/kernels/simd.h"', False),
    ("lib/engine/cpu_engine.cc", '"lib/kernels/activation.h"', True),
    ("lib/engine/cpu_engine.cc", "<grpcpp/server.h>", True),
    ("lib/engine/cpu_engine.cc", "<grpc/grpc.h>", True),
    ("lib/engine/cpu_engine.cc", '"layerd/v1/tensor.pb.h"', True),
    ("lib/engine/cpu_engine.cc", '"wire/tensor_codec.h"', True),
    ("wire/tensor_codec.cc", '"layerd/v1/tensor.pb.h"', False),
    ("wire/tensor_codec.cc", '"google/rpc/status.pb.h"', False),
    ("wire/tensor_codec.cc", '"lib/engine/layer_engine.h"', False),
    ("wire/tensor_codec.cc", '"lib/engine/cpu_engine.h"', True),
    ("wire/tensor_codec.cc", '"server/server.h"', True),
    ("server/server.cc", "<grpcpp/server.h>", False),
    ("server/server.cc", '"lib/engine/cpu_engine.h"', False),
    ("server/server.cc", '"client/remote_engine.h"', True),
    ("server/server.cc", '  #  include "lib/layers/normalize.h"', True),
    ("client/remote_engine.cc", '"layerd/v1/layer_service.grpc.pb.h"', False),
    ("client/remote_engine.cc", '"lib/engine/cpu_engine.h"', True),
    ("client/remote_engine.cc", '"server/server.h"', True),
    ("client/remote_engine.cc", '// #include "server/server.h"', False),
    ("tests/e2e/all_test.cc", '"server/server.h"', False),
    ("tests/e2e/all_test.cc", '"hwy/highway.h"', False),
]


def self_test():
    with tempfile.TemporaryDirectory() as root:
        def write(path, text):
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)

        lines = {}
        expected = set()
        for path, include, wrong in SELF_TEST:
            lines.setdefault(path, []).append(include if "include" in include else f"#include {include}")
            if wrong:
                expected.add(f"{path}:{len(lines[path])}")
        for path in lines:
            write(path, "\n".join(lines[path]) + "\n")
        write("lib/kernels/simd.h", "")  # what the relative include means
        write("build/release/x.cc", '#include "server/server.h"\n')
        write(".git/x.cc", '#include "server/server.h"\n')
        write("utils/x.cc", "")
        write("lib/x.h", "")
        expected |= {"utils/x.cc:1", "lib/x.h:1"}

        found = {violation_line.rsplit(": ", 1)[0] for violation_line in check(root)}
        for place in sorted(expected - found):
            print(f"self-test: not found: {place}")
        for place in sorted(found - expected):
            print(f"self-test: found where there is none: {place}")
        command = [sys.executable, os.path.abspath(__file__), "--root", root]
        status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if status != 1:
            print(f"self-test: exit status {status} for a tree with violations, expected 1")
    with tempfile.TemporaryDirectory() as root:
        os.makedirs(os.path.join(root, "wire"))
        with open(os.path.join(root, "wire/x.cc"), "w", encoding="utf-8") as file:
            file.write('#include "lib/base/dtype.h"\n')
        clean = subprocess.run([sys.executable, os.path.abspath(__file__), "--root", root], check=False).returncode
        if clean != 0:
            print(f"self-test: exit status {clean} for a tree without violations, expected 0")
    good = expected == found and status == 1 and clean == 0
    print(f"self-test: {'passed' if good else 'failed'}, {len(SELF_TEST)} includes, {len(expected)} violations")
    return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(description="Checks who includes whom.")
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                        help="the tree to check; this script's own by default")
    parser.add_argument("--self-test", action="store_true", help="check this script instead")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    found = check(arguments.root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
