# Maps the repositories that Bazel and this project ask for onto Debian packages.
#
#   @system                 libraries with headers in /usr/include (system.BUILD lists them)
#   @cuda                   nvcc, if this machine has one (cuda_repository.bzl)
#   @rules_cc               Bazel 4.2 wants it; its native rules under that name
#   @remote_coverage_tools  Bazel 4.2 wants it for `bazel test`; an empty program
#   the rest                packaged under /usr/share/bazel

load("//deploy/bazel:cuda_repository.bzl", "cuda_repository")

_PACKAGED = {
    "bazel_skylib": "/usr/share/bazel/tools/skylib",
    "platforms": "/usr/share/bazel/tools/platforms",
    "rules_java": "/usr/share/bazel/rules/java",
    "rules_proto": "/usr/share/bazel/rules/proto",
}

_RULES_CC = """
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
"""

def _rules_cc_repository_impl(repository):
    repository.file("BUILD")
    repository.file("cc/BUILD")
    repository.file("cc/defs.bzl", _RULES_CC)

_rules_cc_repository = repository_rule(implementation = _rules_cc_repository_impl)

def _remote_coverage_tools_impl(repository):
    repository.symlink(Label("//deploy/bazel:remote_coverage_tools.BUILD"), "BUILD")
    repository.file("empty.sh", "#!/bin/sh\n", executable = True)

_remote_coverage_tools_repository = repository_rule(implementation = _remote_coverage_tools_impl)

def _system_repository_impl(repository):
    repository.symlink(Label("//deploy/bazel:system.BUILD"), "BUILD")
    repository.symlink(Label("//deploy/bazel:system_library.bzl"), "system_library.bzl")

_system_repository = repository_rule(implementation = _system_repository_impl)

def debian_repositories():
    for name, path in _PACKAGED.items():
        native.local_repository(name = name, path = path)
    _rules_cc_repository(name = "rules_cc")
    _remote_coverage_tools_repository(name = "remote_coverage_tools")
    _system_repository(name = "system")
    cuda_repository(name = "cuda")
