# cuda_library: C++ and CUDA sources compiled by nvcc into a cc_library, or, where nvcc is absent, the headers alone.

load("@cuda//:config.bzl", "HAVE_CUDA", "NVCC", "NVCC_VERSION")
load("@rules_cc//cc:defs.bzl", "cc_library")

# Machine code for A100 and for H100/H200 (`a`: wgmma and setmaxnreg), and PTX for whatever comes later.
_ARCHITECTURES = [
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    "-gencode=arch=compute_90a,code=sm_90a",
]

# nvcc's own front end and the code it generates trip -Wextra, so the host compiler is held to -Wall.
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-Werror=all-warnings",
    "-Xcompiler=-fPIC,-Wall,-Werror",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
]

# What ptxas says of each kernel (registers, stack, spills) is kept beside the object, where tests/static looks for it.
# nvcc names temporary files by its process number, which is the same in all sandboxes: they get folders of their own.
# Headers that it does not read are told to Bazel, which need not compile anew when they change. If that were all, the
# list of those that it reads would have been misread, and none are told.
_COMPILE = """
usage=$1; unused=$2; headers=$3; shift 3
TMPDIR=$(mktemp -d) || exit 1
export TMPDIR
"$@" -MD -MF "$TMPDIR/read" 2>"$usage"
code=$?
if [ $code = 0 ]; then
  tr -s ' \\\\' '\\n' <"$TMPDIR/read" | sed 's,^[.]/,,' | grep -vxFf - "$headers" >"$unused"
  if cmp -s "$unused" "$headers"; then : >"$unused"; fi
fi
rm -rf "$TMPDIR"
[ $code = 0 ] || cat "$usage" >&2
exit $code
"""

def _cuda_objects_impl(ctx):
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context
    flags = _FLAGS + _ARCHITECTURES + ctx.attr.copts
    flags += ["-DSINKHORN_NVCC_" + NVCC_VERSION.replace(".", "_")]  # A new nvcc compiles all anew.
    flags += ["-I.", "-I" + ctx.bin_dir.path]
    flags += ["-isystem=" + path for path in context.system_includes.to_list()]
    flags += ["-D" + define for define in context.defines.to_list()]
    headers = depset(ctx.files.hdrs, transitive = [context.headers])
    listed = ctx.actions.declare_file("_nvcc/%s/headers" % ctx.label.name)
    ctx.actions.write(listed, "".join([header.path + "\n" for header in headers.to_list()]))
    objects = []
    for source in ctx.files.srcs:
        stem = "_nvcc/%s/%s" % (ctx.label.name, source.basename[:-len("." + source.extension)])
        object = ctx.actions.declare_file(stem + ".pic.o")
        usage = ctx.actions.declare_file(stem + ".usage")
        unused = ctx.actions.declare_file(stem + ".unused")
        ctx.actions.run(
            executable = "/bin/bash",
            arguments = ["-c", _COMPILE, "nvcc", usage.path, unused.path, listed.path, NVCC] + flags +
                        ["-c", source.path, "-o", object.path],
            inputs = depset([source, listed], transitive = [headers]),
            outputs = [object, usage, unused],
            unused_inputs_list = unused,
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % source.short_path,
            use_default_shell_env = True,
        )
        objects.append(object)
    return [DefaultInfo(files = depset(objects))]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = True),
        "srcs": attr.label_list(allow_files = [
            ".cc",
            ".cu",
        ]),
    },
)

# The host's configuration is the same whatever the target's flags are: a sanitizer's build compiles no kernel again.
def _built_once_impl(ctx):
    return [DefaultInfo(files = depset(ctx.files.objects))]

_built_once = rule(
    implementation = _built_once_impl,
    attrs = {"objects": attr.label(cfg = "host")},
)

def cuda_library(name, srcs = [], hdrs = [], textual_hdrs = [], copts = [], deps = [], **kwargs):
    """A cc_library whose sources are CUDA.

    Dependents get SINKHORN_HAVE_CUDA as 0 or 1. Where it is 0 the headers are there and nothing they declare is.

    Args:
      name: the library.
      srcs: .cu files, and .cc files, which have nothing for a GPU and take a third of the time.
      hdrs: contract headers: included by C++ too, so free of CUDA headers unless every user is one of these.
      textual_hdrs: headers for such sources alone.
      copts: further words for nvcc.
      deps: C++ and CUDA libraries.
      **kwargs: as for cc_library.
    """
    deps = deps + ["@cuda//:runtime"]
    if HAVE_CUDA:
        _cuda_objects(
            name = name + "_kernels",
            srcs = srcs,
            hdrs = hdrs + textual_hdrs,
            copts = copts,
            tags = ["manual"],  # `//...` would compile them for the target as well.
            deps = deps,
            visibility = ["//visibility:private"],
        )
        _built_once(
            name = name + "_nvcc",
            objects = name + "_kernels",
            visibility = ["//visibility:private"],
        )
    cc_library(
        name = name,
        srcs = [name + "_nvcc"] if HAVE_CUDA and srcs else [],
        hdrs = hdrs,
        textual_hdrs = textual_hdrs,
        deps = deps,
        **kwargs
    )
