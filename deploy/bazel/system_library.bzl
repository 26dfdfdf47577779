# A library installed by the system: nothing to compile, only words for the compiler and the linker.

def _system_library_impl(ctx):
    compilation = cc_common.create_compilation_context(
        system_includes = depset(ctx.attr.system_includes),
        defines = depset(ctx.attr.defines),
    )
    linking = cc_common.create_linking_context(linker_inputs = depset([
        cc_common.create_linker_input(
            owner = ctx.label,
            user_link_flags = depset(ctx.attr.linkopts),
        ),
    ]))
    own = CcInfo(compilation_context = compilation, linking_context = linking)
    return cc_common.merge_cc_infos(
        direct_cc_infos = [own],
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    )

system_library = rule(
    implementation = _system_library_impl,
    attrs = {
        "defines": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        # One list is kept together and in this order; lists of dependents come first.
        "linkopts": attr.string_list(),
        # Folders under /usr/include: anything else is outside the compiler's sandbox.
        "system_includes": attr.string_list(),
    },
    provides = [CcInfo],
)

def static_archives(names):
    """Linker words for static archives that may need each other in any order."""
    return ["-Wl,--start-group"] + ["-l:lib%s.a" % name for name in names] + ["-Wl,--end-group"]
