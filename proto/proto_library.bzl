# cc_proto_library and cc_grpc_library in one, with Debian's protoc.
load("@rules_cc//cc:defs.bzl", "cc_library")

def cc_proto_library(name, src, deps = [], grpc = False, visibility = None):
    """Makes the C++ library of one .proto file.

    Imports, here and in C++, are relative to this folder: `import "google/rpc/status.proto"` and
    `#include "google/rpc/status.pb.h"`. The headers count as system headers, so generated code answers to
    nobody's warnings.

    Args:
      name: the library; `name` + "_src" is the .proto file with all that it imports.
      src: one .proto file.
      deps: libraries of the .proto files it imports, google/protobuf excepted.
      grpc: whether to make stubs of its services too (`.grpc.pb.h`).
      visibility: of the library.
    """
    stem = src[:-len(".proto")]
    headers = [stem + ".pb.h"] + ([stem + ".grpc.pb.h"] if grpc else [])
    sources = [stem + ".pb.cc"] + ([stem + ".grpc.pb.cc"] if grpc else [])
    imports = [dep + "_src" for dep in deps]
    native.filegroup(
        name = name + "_src",
        srcs = [src] + imports,
    )
    native.genrule(
        name = name + "_gen",
        srcs = [src] + imports,
        outs = headers + sources,
        cmd = "protoc --proto_path={package} --cpp_out=$(RULEDIR) {grpc} $(location {src})".format(
            grpc = "--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin --grpc_out=$(RULEDIR)" if grpc else "",
            package = native.package_name(),
            src = src,
        ),
    )
    cc_library(
        name = name,
        srcs = sources,
        hdrs = headers,
        copts = ["-w"],
        includes = ["."],
        visibility = visibility,
        deps = deps + ["@system//:protobuf"] + (["@system//:grpc++"] if grpc else []),
    )
