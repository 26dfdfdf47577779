# @cuda: finds nvcc ($CUDA_HOME, PATH, /usr/local/cuda) and says once when there is none.

def _toolkit_root(repository, nvcc):
    # nvcc may be a wrapper script or a link, so ask it where it lives.
    result = repository.execute([nvcc, "--dryrun", "-v", "none.cu"])
    for line in (result.stderr + result.stdout).split("\n"):
        if line.startswith("#$ TOP="):
            return str(repository.path(line[len("#$ TOP="):].strip()))
    return None

def _version(repository, nvcc):
    for word in repository.execute([nvcc, "--version"]).stdout.replace("\n", " ").split(" "):
        if word.startswith("V") and word[1:2].isdigit():
            return word[1:]
    return "unknown"

def _find_nvcc(repository):
    places = ["/usr/local/cuda/bin/nvcc"]
    if repository.os.environ.get("CUDA_HOME"):
        places.insert(0, repository.os.environ["CUDA_HOME"] + "/bin/nvcc")
    on_path = repository.which("nvcc")
    if on_path:
        places.insert(len(places) - 1, str(on_path))
    for place in places:
        if repository.path(place).exists:
            return place
    return None

def _cuda_repository_impl(repository):
    nvcc = _find_nvcc(repository)
    root = _toolkit_root(repository, nvcc) if nvcc else None
    if not root:
        print("nvcc not found: the CUDA backend is left out of this build")  # buildifier: disable=print
    repository.symlink(Label("//deploy/bazel:cuda.BUILD"), "BUILD")
    repository.symlink(Label("//deploy/bazel:system_library.bzl"), "system_library.bzl")
    repository.file("config.bzl", "\n".join([
        "# Written by deploy/bazel/cuda_repository.bzl.",
        "HAVE_CUDA = %s" % bool(root),
        "NVCC = %r" % (root + "/bin/nvcc" if root else ""),
        "CUDA_ROOT = %r" % (root or ""),
        "NVCC_VERSION = %r" % (_version(repository, nvcc) if root else ""),
        "",
    ]))

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
