// The backends that the suite runs on, and the fixture that runs each test on each of them.
#ifndef SINKHORN_TESTS_CONFORMANCE_BACKENDS_H_
#define SINKHORN_TESTS_CONFORMANCE_BACKENDS_H_

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace sinkhorn::conformance {

// All there could be, present or not:
//   cpu           the CPU backend as the server makes it
//   cpu_streamed  the same without a kernel cache: every transport problem takes the path of the large ones
//   cuda          the first CUDA device
std::vector<std::string> BackendNames();

// A new backend, or null where it is absent or left out by --backend. `threads` 0: its default;
// only CPUs heed it.
std::unique_ptr<Backend> MakeBackend(const std::string& name, int threads = 0);

// True for backends whose `threads` can be chosen.
bool HasThreads(const std::string& name);

// Runs a test on the backend that is its parameter; skips it where there is none.
class ConformanceTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override;
  Backend* backend() { return backend_; }

 private:
  Backend* backend_ = nullptr;  // One per process and name.
};

// On all backends; on one per device, for tests that a kernel cache does not concern.
#define INSTANTIATE_ON_BACKENDS(fixture) SINKHORN_INSTANTIATE(fixture, ::sinkhorn::conformance::BackendNames())
#define INSTANTIATE_ON_DEVICES(fixture) SINKHORN_INSTANTIATE(fixture, {"cpu", "cuda"})
#define SINKHORN_INSTANTIATE(fixture, ...)                                                      \
  INSTANTIATE_TEST_SUITE_P(, fixture, testing::ValuesIn(std::vector<std::string>(__VA_ARGS__)), \
                           [](const auto& info) { return info.param; })

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_BACKENDS_H_
