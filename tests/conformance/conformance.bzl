# Tests of the suite: each one's cases are compiled once, for the machine's own backends and for an emulated GPU.

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

def conformance_test(name, slow_emulated = [], emulated_args = [], tags = [], deps = []):
    """A cc_test of NAME.cc on all backends present; a second one on the CUDA backend, its kernels run by the processor.

    Args:
      name: ends in _test.
      slow_emulated: cases that take emulated_NAME many seconds, so that it leaves them out. "*": there is none.
      emulated_args: its other arguments.
      tags: the first test's.
      deps: of the cases, besides what all have.
    """
    cases = name[:-len("test")] + "cases"
    cc_library(
        name = cases,
        testonly = True,
        srcs = [name + ".cc"],
        deps = [
            ":conformance",
            ":fixture",
            "@system//:absl",
            "@system//:gtest",
        ] + deps,
        alwayslink = True,
    )
    cc_test(
        name = name,
        size = "medium",
        tags = tags,
        deps = [
            ":backends",
            ":" + cases,
        ],
    )
    if slow_emulated != ["*"]:
        cc_test(
            name = "emulated_" + name,
            size = "medium",
            args = [
                "--backend=cuda",
                "--gtest_filter='*/cuda-%s'" % ":".join(["*.%s/*" % case for case in slow_emulated]),
            ] + emulated_args,
            tags = ["emulated"],
            deps = [
                ":backends_emulated",
                ":" + cases,
            ],
        )
