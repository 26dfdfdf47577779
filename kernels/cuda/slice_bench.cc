// What a slice costs beside its kernels, by number and size of the problems in it and by the way their tensors go: the
// evidence for CudaBackendOptions' defaults. Prints a table; needs a GPU.
//
//   bazel run -c opt //kernels/cuda:slice_bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#if SINKHORN_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/echo_family.h"
#include "kernels/cuda/echo_problem.h"

namespace sinkhorn {
namespace cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct Times {
  double slice_us, p90_us, all_us;  // Of Advance; of Admit, Advance and the end.
};

Times Measure(Backend* backend, const std::vector<std::unique_ptr<EchoProblem>>& problems) {
  std::vector<double> slices, alls;
  const auto stop = Clock::now() + std::chrono::milliseconds(150);
  for (int i = 0; i < 2000 && (i < 10 || Clock::now() < stop); ++i) {
    const auto begin = Clock::now();
    std::vector<std::unique_ptr<Solve>> solves;
    std::vector<Solve*> pointers;
    for (const auto& problem : problems) {
      solves.push_back(*backend->Admit(problem->problem));
      pointers.push_back(solves.back().get());
    }
    const auto admitted = Clock::now();
    if (!backend->Advance(0, pointers, 5e-3).ok()) std::abort();
    const auto advanced = Clock::now();
    solves.clear();
    slices.push_back(std::chrono::duration<double>(advanced - admitted).count() * 1e6);
    alls.push_back(std::chrono::duration<double>(Clock::now() - begin).count() * 1e6);
  }
  std::sort(slices.begin(), slices.end());
  std::sort(alls.begin(), alls.end());
  return {slices[slices.size() / 2], slices[slices.size() * 9 / 10], alls[alls.size() / 2]};
}

int Main() {
  const auto devices = ListDevices();
  if (!devices.ok() || devices->empty()) {
    std::printf("no GPU\n");
    return 0;
  }
  CudaBackendOptions options;
  options.families = {EchoFamily()};
  options.zero_copy_problem_bytes = options.zero_copy_slice_bytes = 1 << 30;
  const auto mapped = *MakeCudaBackend(0, options);
  std::printf("%s\n%8s %10s %12s | %28s | %28s\n", mapped->device().name.c_str(), "problems", "KiB each", "KiB in all",
              "over the bus: slice p90 all", "copied: slice p90 all");
  const struct {
    int problems, count, n, m;
  } shapes[] = {{1, 32, 4, 4},     {16, 32, 4, 4},   {64, 32, 4, 4},   {256, 32, 4, 4}, {1024, 32, 4, 4},
                {1, 1, 64, 64},    {1, 4, 64, 64},   {1, 16, 64, 64},  {1, 64, 64, 64}, {1, 256, 64, 64},
                {1, 1024, 64, 64}, {16, 16, 64, 64}, {1, 4096, 64, 64}};
  for (const auto& shape : shapes) {
    std::vector<std::unique_ptr<EchoProblem>> problems;
    for (int i = 0; i < shape.problems; ++i) {
      problems.push_back(std::make_unique<EchoProblem>(shape.count, shape.n, shape.m));
      problems.back()->problem.outputs.f = {};
    }
    const Times over_bus = Measure(mapped.get(), problems);
    for (auto& problem : problems) problem->Copied();
    const Times copied = Measure(mapped.get(), problems);
    const double kib = 2 * 4.0 / 1024 * shape.count * shape.n * shape.m;
    std::printf("%8d %10.1f %12.1f | %12.1f %7.1f %7.1f | %12.1f %7.1f %7.1f\n", shape.problems, kib,
                kib * shape.problems, over_bus.slice_us, over_bus.p90_us, over_bus.all_us, copied.slice_us,
                copied.p90_us, copied.all_us);
  }
  return 0;
}

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn

int main() { return sinkhorn::cuda::Main(); }
#else
int main() { std::printf("built without nvcc\n"); }
#endif
