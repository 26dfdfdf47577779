#include "tests/conformance/backends.h"

#include <cstdio>
#include <map>

#include "absl/flags/flag.h"
#include "kernels/cpu/cpu_backend.h"
#if SINKHORN_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

ABSL_FLAG(std::string, backend, "all", "Backends to run on: cpu, cuda or all. The others are reported as skipped.");

namespace sinkhorn::conformance {
namespace {

bool IsChosen(const std::string& name) {
  const std::string chosen = absl::GetFlag(FLAGS_backend);
  return chosen == "all" || chosen == name.substr(0, name.find('_'));
}

std::unique_ptr<Backend> MakeCpu(int threads, bool streamed) {
  CpuBackendOptions options;
  options.threads = threads;
  if (streamed) options.kernel_cache_bytes = 0;
  return MakeCpuBackend(options);
}

// Null where there is no usable device; says why, once.
std::unique_ptr<Backend> MakeCuda() {
#if SINKHORN_HAVE_CUDA
  absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCudaBackend(/*device=*/0, CudaBackendOptions());
  if (backend.ok()) return *std::move(backend);
  static const bool said = std::fprintf(stderr, "cuda: %s\n", backend.status().ToString().c_str()) > 0;
  (void)said;
#endif
  return nullptr;
}

}  // namespace

std::vector<std::string> BackendNames() { return {"cpu", "cpu_streamed", "cuda"}; }

std::unique_ptr<Backend> MakeBackend(const std::string& name, int threads) {
  if (!IsChosen(name)) return nullptr;
  if (name == "cpu") return MakeCpu(threads, /*streamed=*/false);
  if (name == "cpu_streamed") return MakeCpu(threads, /*streamed=*/true);
  if (name == "cuda") return MakeCuda();
  return nullptr;
}

bool HasThreads(const std::string& name) { return name != "cuda"; }

void ConformanceTest::SetUp() {
  static auto* backends = new std::map<std::string, std::unique_ptr<Backend>>;
  auto [entry, is_new] = backends->try_emplace(GetParam());
  if (is_new) entry->second = MakeBackend(GetParam());
  backend_ = entry->second.get();
  if (!backend_) GTEST_SKIP() << "backend " << GetParam() << ": absent or not chosen";
}

}  // namespace sinkhorn::conformance
