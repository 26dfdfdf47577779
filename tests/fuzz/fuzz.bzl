"""fuzz_target: a file that defines LLVMFuzzerTestOneInput, as a fuzzer and as a test that replays its corpus."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")

def fuzz_target(name, deps):
    """NAME is built from NAME.cc, by clang with --config=fuzz; NAME_replay runs corpus/NAME, by any compiler."""
    cc_binary(
        name = name,
        testonly = True,
        srcs = [name + ".cc"],
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = deps,
    )
    cc_test(
        name = name + "_replay",
        size = "small",
        srcs = [
            name + ".cc",
            "replay_main.cc",
        ],
        args = ["tests/fuzz/corpus/" + name],
        data = native.glob(["corpus/%s/*" % name]),
        tags = ["sanitize"],
        deps = deps,
    )
